"""Books: the names of the ranges that a recorder sees."""

from enum import StrEnum


class Op(StrEnum):
    """What a range is of. The time of a range is without those inside it, so that no time counts twice."""

    # What only holds others: time of their own is time that no name covers.
    STEP = "step"  # one round of the denoising loop
    FORWARD = "forward"
    # Layers, their pieces, and what goes in front of the first and behind the last.
    EMBED = "embed"
    LAYER = "layer"  # between the pieces: rows are cut into parts and put together
    QKV = "qkv"  # norm, projections, rotary angles
    WRITE = "write"  # to the cache: keys and values, hidden states, branches
    ATTENTION = "attention"
    ATTENTION_OUT = "attention_out"
    MLP = "mlp"
    RESIDUAL = "residual"  # branches are added to the residual stream
    HEAD = "head"
    # Records.
    CLUSTERING = "clustering"  # k-means and the layout of clusters
    STORE = "store"  # rows are gathered and handed to the tiers
    ENCODE = "encode"
    FETCH = "fetch"  # records are chosen and asked for
    WAIT = "wait"  # compute stands still for a copy
    DECODE = "decode"
    PAGES = "pages"  # of a streamed feature: which have to come and go
    WEIGHTS = "weights"  # of a streamed layer: they are bound, and those of the next one asked for
    # Policies.
    POLICY = "policy"  # the rows of a step, and what the policy learns from its commit
    DRIFT = "drift"  # attention of centroids, or of a block's rows, beside what it was
    GATHER = "gather"  # rows are brought together from where they are
    PATCH = "patch"  # stored rows and centroids follow the rows that were recomputed
    VERIFY = "verify"  # dLLM-Cache: which rows have moved
    WATCH = "watch"  # Elastic-Cache: whose attention has moved
    # Tokens.
    GUIDANCE = "guidance"
    PROPOSE = "propose"
    COMMIT = "commit"
    PUBLISH = "publish"  # answers, history and streamers follow the canvas


# Ranges whose own time belongs to no operation.
CONTAINERS = frozenset({Op.STEP, Op.FORWARD})
