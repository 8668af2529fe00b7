"""The templates that come with the router."""

from __future__ import annotations

import pytest

from octavo_router import chat_templates
from octavo_router.chat_template import ChatTemplate
from octavo_router.program import _read_template
from octavo_router.tool_parsers import PARSERS, parser_of_template


@pytest.mark.parametrize("name", chat_templates.NAMES)
def test_each_is_a_template_with_tools_of_a_known_family(name: str) -> None:
    source = chat_templates.read(name)
    assert ChatTemplate(source, {}).takes_tools
    assert parser_of_template(source) in PARSERS


def test_the_name_stands_for_the_template() -> None:
    assert _read_template("hermes") == chat_templates.read("hermes")
