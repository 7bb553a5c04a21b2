"""What the options of Polestar are, and may be. Its mechanism reads them where it needs them."""

from dataclasses import dataclass
from typing import Literal

from tiered.clustering.faiss_backend import BACKENDS, Backend, import_faiss
from tiered.core.checks import check_integer, check_number, check_switch, unknown_name
from tiered.core.features import Tier
from tiered.offload.codec_bytes import Codec
from tiered.policies.base import Policy
from tiered.policies.schedule import SELDOM, check_interval

Late = Literal["wait", "skip", "deadline"]
LATE: tuple[Late, ...] = ("wait", "skip", "deadline")
# With so few clusters a reference keeps the attention on each of them apart, which makes the drift exact however much
# of it the renewed ones hold; it takes clusters² numbers, too many where there are hundreds.
MOST_PARTS = 16
REFRESHES = ("full", "drift", "auto")


@dataclass(frozen=True, slots=True, kw_only=True)
class PolestarOptions(Policy):
    """The fields of `Polestar`, apart from what it does with them.

    Attributes:
        clusters: C, in each layer of each sequence, shared by prefix and suffix; "auto": about one for 64 rows.
        top_m: M, clusters that an update renews in each layer; 0: none, which is `fast_dllm_dual`.
        update_threshold: T, commits in one step that call for no update yet.
        cumulative_threshold: commits since the last update that call for none yet; None: as `update_threshold`.
        window_blocks: blocks before the current one, and behind it, that are clustered; None: the whole context.
        cluster_layers: layers that share one clustering; 1: each has its own, as in the paper. Where layers share,
            clusters that one hands to the next are whole there: no stored rows are fetched to mend them.
        codec: how members are stored: a `Codec` of `tiered.offload.codec_bytes`, or its name.
        hidden_tier: where: "host", or "device".
        prefetch_layers: layers ahead for which likely clusters are fetched; 0: none.
        late: a chosen cluster that has not arrived when its rows are needed is waited for ("wait", the only one whose
            answers do not depend on time), left out ("skip"), or waited for `deadline_ms` first ("deadline").
        refresh: what begins a block: "full", every row; or "drift", an update over the finished block and the new one,
            with a refresh at every `refresh_blocks`-th block. The latter is beyond the paper. "auto": "drift" for
            answers of two blocks or more behind 256 tokens or more, else "full".
        renew_response: with `refresh` = "drift", whether the update that begins a block also goes over every cluster
            with rows behind the prompt.
        refresh_interval: forwards from one refresh to the next within a block; None: only the block's first.
        seed: of the clustering.
        kmeans: what iterates it where rows are on the CPU: "torch", or "faiss" (of the extra "faiss"), which is faster
            for narrow models. On a GPU always torch.
    """

    clusters: int | Literal["auto"] = "auto"
    top_m: int = 4
    update_threshold: int = 4
    cumulative_threshold: int | None = None
    window_blocks: tuple[int, int] | None = None
    cluster_layers: int = 4
    codec: Codec | str = Codec.NVFP4_DELTA
    hidden_tier: Tier | str = Tier.HOST
    prefetch_layers: int = 1
    late: Late = "wait"
    deadline_ms: float = 1.0
    refresh: Literal["full", "drift", "auto"] = "full"
    refresh_blocks: int = SELDOM
    renew_response: bool = False
    refresh_interval: int | None = None
    seed: int = 0
    kmeans: Backend = "torch"

    def __post_init__(self) -> None:
        if self.clusters != "auto":
            check_integer("clusters", self.clusters, least=1)
        for name, least in (("top_m", 0), ("update_threshold", 0), ("cluster_layers", 1), ("prefetch_layers", 0)):
            check_integer(name, getattr(self, name), least=least)
        if self.cumulative_threshold is not None:
            check_integer("cumulative_threshold", self.cumulative_threshold, least=0)
        check_integer("refresh_blocks", self.refresh_blocks, least=1)
        check_interval("refresh_interval", self.refresh_interval)
        check_integer("seed", self.seed, least=0)
        check_number("deadline_ms", self.deadline_ms, least=0.0)
        for name, allowed in (
            ("codec", list(Codec)),
            ("hidden_tier", (Tier.HOST, Tier.DEVICE)),
            ("late", LATE),
            ("refresh", REFRESHES),
            ("kmeans", BACKENDS),
        ):
            if getattr(self, name) not in allowed:
                raise unknown_name(name, str(getattr(self, name)), map(str, allowed))
        if self.kmeans == "faiss":
            import_faiss()  # or an error that says how it is installed, before anything is computed
        if self.window_blocks is not None:
            if not isinstance(self.window_blocks, tuple | list):
                raise TypeError(f"window_blocks = {self.window_blocks!r}; blocks before and behind are allowed: (2, 1)")
            if len(self.window_blocks) != 2:
                raise ValueError(f"window_blocks = {self.window_blocks}; blocks before and behind are allowed: (2, 1)")
            for blocks in self.window_blocks:
                check_integer("window_blocks", blocks, least=0)
            object.__setattr__(self, "window_blocks", tuple(self.window_blocks))
        check_switch("renew_response", self.renew_response)
        if self.renew_response and self.refresh != "drift":
            raise ValueError("renew_response = True goes with refresh = 'drift': a refresh renews all rows")
        if self.refresh != "full" and self.refresh_interval is not None:
            raise ValueError(
                f"refresh = {self.refresh!r} saves refreshes, refresh_interval adds some; give one of them"
            )

    @property
    def appended_blocks(self) -> int:
        """Finished blocks that become clusters of their own before the next refresh, at most."""
        return self.refresh_blocks - 1 if self.refresh == "drift" else 0
