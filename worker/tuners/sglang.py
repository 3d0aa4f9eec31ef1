"""Registry entry of the tuner `sglang`: config files of SGLang's Triton kernels (`worker/tuners/engines`)."""

from worker.tuners.engines.specs import engine_spec

NO_LINEAR = "for block-FP8 linear layers SGLang takes DeepGEMM before Triton, so no file of theirs would count"
SPEC = engine_spec(
    "sglang",
    "worker.tuners.engines.tuner:SglangTuner",
    ("fmoe",),
    why_not={"a8w8_blockscale": NO_LINEAR},
)
