"""The parts of `bench_gpu.py`: each measures one thing and returns rows."""
