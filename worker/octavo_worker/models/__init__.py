"""The models a worker computes: one decoder that a `ModelConfig` shapes."""
