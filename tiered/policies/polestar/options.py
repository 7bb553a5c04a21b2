"""Books: what a policy that keeps hidden states wants kept, where, and how much of it an update renews."""

from dataclasses import dataclass
from typing import Literal

from tiered.core.features import Tier
from tiered.offload.codec_bytes import Codec

Late = Literal["wait", "skip", "deadline"]
LATE: tuple[Late, ...] = ("wait", "skip", "deadline")
# With so few clusters a reference keeps the attention on each of them apart, which makes the drift exact however much
# of it the renewed ones hold; it takes clusters² numbers, too many where there are hundreds.
MOST_PARTS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenOptions:
    """How the hidden states of a call are clustered, kept and fetched; `tiered.policies.polestar.policy` explains each.

    Attributes:
        clusters: in each layer of each sequence; "auto": about one for 64 rows.
        top_m: clusters that an update renews in each layer.
        window_blocks: blocks in front of the current one, and behind it, that are clustered; None: all.
        cluster_layers: layers that share one clustering; 1: every layer has its own.
        codec, tier: how and where the members are kept.
        prefetch_layers: layers ahead for which likely clusters are fetched.
        late: what an update does about a cluster that has not arrived when its rows are needed.
        deadline_ms: how long `deadline` waits for it.
        seed: of the clustering.
        renew_response: whether an update that begins a block renews every cluster with rows of the response.
        appended_blocks: finished blocks that become clusters of their own before the next full pass, at most.
    """

    clusters: int | Literal["auto"]
    top_m: int
    window_blocks: tuple[int, int] | None
    cluster_layers: int
    codec: Codec
    tier: Tier
    prefetch_layers: int
    late: Late
    deadline_ms: float
    seed: int
    renew_response: bool = False
    appended_blocks: int = 0
