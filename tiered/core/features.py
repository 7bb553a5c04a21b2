"""The nouns of the ledger: where bytes live, what is cached for a row, and what else takes room."""

from enum import IntFlag, StrEnum


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
# What attention reads.
KEY_VALUE = frozenset({Feature.KEY, Feature.VALUE})


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


class ColumnState(IntFlag):
    """Where the state of a column is and what the forward did to it; several may be true, none is `DEVICE`."""

    DEVICE = 0  # nothing of it lies below the device, and the forward read it as it was
    STORED = 1  # a member of clusters whose rows lie below the device, in one layer or more
    STREAMED = 2  # some layers of its features lie below the device, and pass through it when they are read
    RECOMPUTED = 4  # its keys and values were computed anew, in one layer or more
    FETCHED = 8  # its stored row came to the device, in one layer or more, and its cluster was recomputed
