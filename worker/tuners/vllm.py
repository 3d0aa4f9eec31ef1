"""Registry entry of the tuner `vllm`: config files of vLLM's Triton kernels, searched in `worker/tuners/engines`."""

from worker.tuners.engines.specs import engine_spec

SPEC = engine_spec("vllm", "worker.tuners.engines.tuner:VllmTuner", ("a8w8_blockscale", "fmoe"))
