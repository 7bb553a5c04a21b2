"""Books: the sizes of one call, from which all its bytes follow."""

from collections.abc import Mapping
from dataclasses import dataclass

from tiered.core.checks import unknown_name
from tiered.core.features import ANSWER_ONLY, Feature
from tiered.models.shape import BYTES_PER_ELEMENT, ModelShape
from tiered.offload.codec_bytes import Codec

DEFAULT_BLOCK_LENGTH = 32
KV_CODECS: Mapping[str, Codec] = {"raw": Codec.RAW, "fp8": Codec.FP8, "nvfp4": Codec.NVFP4_ROW}


def kv_codec(name: str) -> Codec:
    """The codec of keys and values that `name` stands for. Pages of them are read, changed and written again, so it has
    to be one that a row goes through any number of times as through the first.

    Raises:
        ValueError: no such codec.
    """
    if name not in KV_CODECS:
        raise unknown_name("kv", name, KV_CODECS)
    return KV_CODECS[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """What of a GPU decides how much its libraries take.

    Attributes:
        workspace_bytes: of cuBLAS.
        multiprocessors: how many it has.
        name: as its driver has it; "": of no GPU in particular.
    """

    workspace_bytes: int
    multiprocessors: int
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSizes:
    """What decides how much a call takes, beside its policy.

    Attributes:
        shape: sizes of the model.
        batch: sequences asked for.
        context: positions of the canvas, prompt and answer together.
        block_length: positions of a block.
        dtype: of weights and activations, a key of `BYTES_PER_ELEMENT`.
        kv: codec of keys and values.
        answer: positions behind the prompt, for features that are kept of them alone; None: any number of them.
        guidance: classifier-free guidance, with which twice as many sequences go through a forward.
        sampled: whether proposing takes more than the logits: tokens are drawn at a temperature above 0, the
            distribution is cut, or its entropy is the confidence.
        compared: whether the last layer's attention of the block is kept, for a commit rule that needs its shift.
        gpu: that the call runs on; None: on the CPU, whose libraries take nothing.
    """

    shape: ModelShape
    batch: int
    context: int
    block_length: int
    dtype: str
    kv: Codec = Codec.RAW
    answer: int | None = None
    guidance: bool = False
    sampled: bool = False
    compared: bool = False
    gpu: Gpu | None = None

    @property
    def sequences(self) -> int:
        """Sequences that go through a forward together."""
        return self.batch * (2 if self.guidance else 1)

    @property
    def element(self) -> int:
        """Bytes of an element of weights and activations."""
        return BYTES_PER_ELEMENT[self.dtype]

    def columns(self, feature: Feature) -> int:
        """Columns of a sequence for which `feature` is kept."""
        return self.answer if self.answer and feature in ANSWER_ONLY else self.context
