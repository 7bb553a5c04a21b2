"""Books: names of the ranges of the code."""

from enum import StrEnum


class Op(StrEnum):
    """The operation of a range. Its time excludes ranges inside it, so no time counts twice."""

    STEP = "step"  # one round of the denoising loop
    FORWARD = "forward"
    EMBED = "embed"
    LAYER = "layer"  # splits and joins rows between the pieces
    QKV = "qkv"  # norm, projections, rotary angles
    WRITE = "write"  # keys, values, hidden states and branches go to the cache
    ATTENTION = "attention"
    ATTENTION_OUT = "attention_out"
    MLP = "mlp"
    RESIDUAL = "residual"  # branches are added to the residual stream, and the norm in front of the MLP, which adds one
    HEAD = "head"
    CLUSTERING = "clustering"  # k-means and the layout of clusters
    STORE = "store"  # rows are gathered and given to the tiers
    ENCODE = "encode"
    FETCH = "fetch"  # records are chosen and requested
    WAIT = "wait"  # compute waits for a copy
    DECODE = "decode"
    CHUNKS = "chunks"  # chunks of a streamed feature are chosen, to fetch and to write home
    WEIGHTS = "weights"  # a streamed layer's weights are bound, and the next layer's requested
    POLICY = "policy"  # chooses the rows of a step, and observes the commit
    DRIFT = "drift"  # attention of centroids, or of a block's rows, is compared with the last one
    GATHER = "gather"  # rows are gathered
    PATCH = "patch"  # stored rows and centroids are updated from recomputed rows
    VERIFY = "verify"  # dLLM-Cache finds rows that have changed
    WATCH = "watch"  # a policy looks at the attention of the block's rows
    GUIDANCE = "guidance"
    PROPOSE = "propose"
    COMMIT = "commit"
    PUBLISH = "publish"  # answers, history and streamers follow the canvas


CONTAINERS = frozenset({Op.STEP, Op.FORWARD})  # their own time belongs to no operation
