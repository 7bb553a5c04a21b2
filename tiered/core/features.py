"""Tiers, features of a row, accounts of the ledger, and states of a column."""

from enum import IntFlag, StrEnum


class Tier(StrEnum):
    """A place of bytes. Without CUDA, the device tier is the process's own memory."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


class Feature(StrEnum):
    """A tensor that is cached for one row in one layer."""

    KEY = "key"  # after RoPE, so cached keys are not rotated again; not cached where keys are made of values
    VALUE = "value"
    HIDDEN = "hidden"  # the layer's input
    ATTN_OUT = "attn_out"
    FFN_OUT = "ffn_out"


# Features of answers only: a prompt's rows are recomputed in all layers or in none, and need no branches.
ANSWER_ONLY = frozenset({Feature.ATTN_OUT, Feature.FFN_OUT})
# Features that attention reads.
KEY_VALUE = frozenset({Feature.KEY, Feature.VALUE})


class Account(StrEnum):
    """An account of the ledger: each `Feature`, and the other uses of a tier."""

    WEIGHTS = "weights"
    KEY = Feature.KEY.value
    VALUE = Feature.VALUE.value
    HIDDEN = Feature.HIDDEN.value
    ATTN_OUT = Feature.ATTN_OUT.value
    FFN_OUT = Feature.FFN_OUT.value
    CENTROIDS = "centroids"
    STAGING = "staging"  # rings for copies of records
    SPARE = "spare"  # memory and file space of the arenas without a record
    LOGITS = "logits"
    ACTIVATIONS = "activations"
    LIBRARIES = "libraries"  # workspaces of cuBLAS and of attention, on CUDA


class ColumnState(IntFlag):
    """The places of a column's features and the forward's work on it; several flags may be set, `DEVICE` is none."""

    DEVICE = 0  # all features are on the device, and the forward did not change them
    STORED = 1  # in one layer or more, it is a member of a cluster with rows below the device
    STREAMED = 2  # some layers of its features are below the device, and streamed when they are read
    RECOMPUTED = 4  # in one layer or more, its keys and values were recomputed
    FETCHED = 8  # in one layer or more, its stored row was fetched, and its cluster recomputed
