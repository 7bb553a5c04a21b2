"""Centroids that records are decoded against: immutable, versioned, and kept as long as a record needs them."""

from collections.abc import Sequence
from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor

from tiered.core.features import Account, Tier
from tiered.core.ledger import Ledger


class CentroidBank:
    """The centroids of one layer of one sequence at one version; made by `TierManager.bank`.

    A delta decodes only against the very centroids that it was made with. So every such record refers to its bank,
    moved centroids are a new bank, and the old one stays on the device until its last record is gone.

    Attributes:
        version: of the cluster index that the centroids belong to.
    """

    __slots__ = ("_centroids", "_holders", "_ledger", "version")

    def __init__(self, centroids: Float[Tensor, "clusters width"], version: int, ledger: Ledger) -> None:
        """Books the bytes; the maker is the first holder.

        Raises:
            TierCapacityError: the device budget has no room for them.
        """
        ledger.allocate({Account.CENTROIDS: centroids.nbytes}, Tier.DEVICE, hint="lower `clusters`")
        self._centroids: Tensor | None = centroids
        self.version = version
        self._ledger = ledger
        self._holders = 1

    @property
    def centroids(self) -> Float[Tensor, "clusters width"]:
        """On the device, in the model's dtype; they are never written.

        Raises:
            ValueError: the last holder gave them back.
        """
        if self._centroids is None:
            raise ValueError(f"the centroids of version {self.version} were given back")
        return self._centroids

    def hold(self) -> None:
        """One more record or caller needs the centroids. Errors as `centroids`."""
        _ = self.centroids
        self._holders += 1

    def release(self) -> None:
        """One fewer needs them; the last gives the bytes back."""
        centroids = self.centroids
        self._holders -= 1
        if not self._holders:
            self._ledger.release({Account.CENTROIDS: centroids.nbytes}, Tier.DEVICE)
            self._centroids = None


class DeltaBase(NamedTuple):
    """What a delta record is decoded against."""

    bank: CentroidBank
    cluster: int


def banks_of(bank: CentroidBank | Sequence[CentroidBank], records: int) -> Sequence[CentroidBank]:
    """The bank of each of so many records, where `bank` may be one for all."""
    return [bank] * records if isinstance(bank, CentroidBank) else bank
