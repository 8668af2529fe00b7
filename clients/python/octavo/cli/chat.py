"""`octavo chat`: a conversation in the terminal, or one question from a script."""

from __future__ import annotations

import argparse
import contextlib
import sys

from octavo.cli.flags import add_model_argument, add_sampling_flags, sampling_of
from octavo.cli.server_choice import add_server_flags, chosen_server
from octavo.client import Client
from octavo.errors import OctavoError
from octavo.types import CompletionOutput, Message, SamplingParams

_HELP = "/reset forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer"


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command's parser."""
    parser = commands.add_parser(
        "chat",
        help="talk to a model in the terminal",
        description="Talks to the server at --address, or starts one of its own for MODEL. "
        f"In the conversation: {_HELP}.",
    )
    add_model_argument(parser)
    parser.add_argument("--message", metavar="TEXT", help="ask this, print the answer and leave")
    parser.add_argument("--system", metavar="TEXT", help="the system message that opens the conversation")
    add_sampling_flags(parser, max_tokens=None)
    add_server_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the conversation, or the one question."""
    with chosen_server(args) as server, Client(server.address, **server.access) as client:
        chat = Conversation(client, sampling_of(args), args.system)
        if args.message is not None:
            chat.ask(args.message)
            return 0
        model = client.list_models()[0].name
        print(f"Talking to {model}. {_HELP}.")
        return converse(chat)


class Conversation:
    """The turns so far. `ask` adds one of the user's and one of the model's."""

    def __init__(self, client: Client, params: SamplingParams, system: str | None) -> None:
        self._client = client
        self._params = params
        self._opening: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self.messages: list[Message] = list(self._opening)

    def reset(self) -> None:
        """Forgets all turns but the system message."""
        self.messages = list(self._opening)

    def ask(self, text: str) -> None:
        """Prints the answer as it comes.

        On an interrupt what was said so far stays in the conversation; on an error the question does not. Both are
        raised.
        """
        question: Message = {"role": "user", "content": text}
        with self._client.stream_chat([*self.messages, question], self._params) as stream:
            try:
                for delta in stream:
                    print(delta.text, end="", flush=True)
            except KeyboardInterrupt:
                self._keep(question, stream.output.outputs)
                raise
            finally:
                print(flush=True)
        self._keep(question, stream.output.outputs)

    def _keep(self, question: Message, outputs: list[CompletionOutput]) -> None:
        answer = outputs[0].text if outputs else ""
        self.messages += [question, {"role": "assistant", "content": answer}]


def converse(chat: Conversation) -> int:
    """Reads lines and answers them until the user leaves. An error is shown, and the conversation goes on."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (gives input() a history and line editing)
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            print()
            return 0
        except KeyboardInterrupt:
            print(f"\n{_HELP}")
            continue
        match line:
            case "":
                continue
            case "/exit" | "/quit":
                return 0
            case "/reset":
                chat.reset()
            case _ if line.startswith("/"):
                print(f"no such command: {line.split()[0]}. {_HELP}")
            case _:
                with contextlib.suppress(KeyboardInterrupt):
                    _answer(chat, line)


def _answer(chat: Conversation, line: str) -> None:
    try:
        chat.ask(line)
    except OctavoError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
