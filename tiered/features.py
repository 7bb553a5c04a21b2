"""The nouns of the ledger: where bytes live, what is cached for a row, and what else takes room."""

from enum import StrEnum


class Tier(StrEnum):
    """Where bytes live. On a machine without CUDA the device tier is the process's own memory."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


class Feature(StrEnum):
    """What is cached for one row in one layer."""

    KEY = "key"  # after RoPE, so that a cached key is never rotated again
    VALUE = "value"
    HIDDEN = "hidden"  # the layer's input
    ATTN_OUT = "attn_out"
    FFN_OUT = "ffn_out"


# Kept behind the prompt alone: a prompt's rows are recomputed through all layers or not at all, and need no branches.
ANSWER_ONLY = frozenset({Feature.ATTN_OUT, Feature.FFN_OUT})


class Account(StrEnum):
    """What the ledger books bytes under: every `Feature`, and everything else that takes room in a tier."""

    WEIGHTS = "weights"
    KEY = Feature.KEY.value
    VALUE = Feature.VALUE.value
    HIDDEN = Feature.HIDDEN.value
    ATTN_OUT = Feature.ATTN_OUT.value
    FFN_OUT = Feature.FFN_OUT.value
    CENTROIDS = "centroids"
    STAGING = "staging"  # rings that records pass through
    SPARE = "spare"  # memory and file space of the arenas that no record fills
    LOGITS = "logits"
    ACTIVATIONS = "activations"
    LIBRARIES = "libraries"  # workspaces of cuBLAS and of attention, on CUDA
