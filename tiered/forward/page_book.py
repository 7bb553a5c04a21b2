"""Books: which layers of a feature are in which workspace, and which of their pages are there. No tensors.

A layer enters the workspace that has rested longest; what was written of the layer that leaves goes to the tiers:

    (not here) ──enter──▶ in a workspace ──another enters──▶ (not here)
                          its pages:  ──sent──▶ coming ──landed──▶ valid ──wrote──▶ dirty

A set of pages is an integer, one bit for each page of each sequence. Pages that were never written are neither
valid nor stored, and nothing is to be fetched of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Departure:
    """A layer that leaves a workspace.

    Attributes:
        layer: which.
        workspace: whose content it is until something is written there.
        dirty: pages to store.
    """

    layer: int
    workspace: int
    dirty: int


@dataclass(eq=False, slots=True)
class _Resident:
    workspace: int
    valid: int = 0
    dirty: int = 0
    coming: int = 0
    unread: int = 0  # have come, and were not asked for since


class PageBook:
    """The streamed layers of one feature over some workspaces."""

    def __init__(self, layers: Sequence[int], workspaces: int) -> None:
        """`layers`: ascending, as a step goes through them.

        Raises:
            ValueError: no layers or none to put them in.
        """
        if not layers or workspaces < 1:
            raise ValueError(f"{len(layers)} layers in {workspaces} workspaces: one or more of both are needed")
        self._stored = dict.fromkeys(layers, 0)
        self._following = dict(zip(layers, [*layers[1:], layers[0]], strict=True))
        self._here: dict[int, _Resident] = {}  # by layer, the one that has rested longest first
        self._free = list(range(workspaces))
        self.workspaces = workspaces

    def __contains__(self, layer: object) -> bool:
        return layer in self._stored

    def workspace(self, layer: int) -> int | None:
        """Where `layer` is; None: in the tiers alone."""
        return self._here[layer].workspace if layer in self._here else None

    def following(self, layer: int) -> int | None:
        """The streamed layer that a step comes to after `layer`, where there is a workspace for both; None: none."""
        after = self._following[layer]
        return None if after == layer or self.workspaces == 1 else after

    def enter(self, layer: int) -> Departure | None:
        """`layer` is about to be used: give it a workspace if it has none. Returns the layer that leaves for it, whose
        dirty pages count as stored from now on.

        Raises:
            ValueError: pages of the layer that leaves are still coming.
        """
        if layer in self._here:
            self._here[layer] = self._here.pop(layer)
            return None
        left = None
        if not self._free:
            left = self._leave(next(iter(self._here)))
            self._free.append(left.workspace)
        self._here[layer] = _Resident(self._free.pop())
        return left

    def leaver(self, layer: int) -> int | None:
        """The layer that would leave if `layer` entered; None: none."""
        return None if layer in self._here or self._free else next(iter(self._here))

    def empty(self) -> list[Departure]:
        """Let every layer leave. Errors as `enter`."""
        left = [self._leave(layer) for layer in list(self._here)]
        self._free = list(range(self.workspaces))
        return left

    def wanted(self, layer: int, pages: int) -> int:
        """Those of `pages` that have to come from the tiers, coming already or not."""
        return pages & self._stored[layer] & ~self._here[layer].valid

    def missing(self, layer: int, pages: int) -> int:
        """Those of `wanted` that were not sent for."""
        return self.wanted(layer, pages) & ~self._here[layer].coming

    def read(self, layer: int, pages: int) -> int:
        """`pages` are there and used. Returns those that had to come for it from the tiers."""
        resident = self._here[layer]
        fetched = resident.unread & pages
        resident.unread &= ~pages
        return fetched

    def coming(self, layer: int) -> int:
        """Pages that were sent for."""
        return self._here[layer].coming if layer in self._here else 0

    def sent(self, layer: int, pages: int) -> None:
        """`pages` are being fetched to the layer's workspace.

        Raises:
            ValueError: some of them are there, coming, or not stored.
        """
        if pages & ~self.missing(layer, pages):
            raise ValueError(f"pages {pages:b} of layer {layer} are not all missing")
        self._here[layer].coming |= pages

    def landed(self, layer: int, pages: int) -> None:
        """`pages` have come. Errors as `given_up`."""
        self.given_up(layer, pages)
        self._here[layer].valid |= pages
        self._here[layer].unread |= pages

    def given_up(self, layer: int, pages: int) -> None:
        """`pages` will not come.

        Raises:
            ValueError: they were not coming.
        """
        resident = self._here[layer]
        if pages & ~resident.coming:
            raise ValueError(f"pages {pages:b} of layer {layer} are not all coming: {resident.coming:b} are")
        resident.coming &= ~pages

    def wrote(self, layer: int, pages: int) -> None:
        """`pages` were written: what of each was not overwritten was there, or has never been.

        Raises:
            ValueError: some are still coming, and would overwrite them.
        """
        resident = self._here[layer]
        if pages & resident.coming:
            raise ValueError(f"pages {pages:b} of layer {layer} are written while {resident.coming:b} are coming")
        resident.valid |= pages
        resident.dirty |= pages
        resident.unread &= ~pages

    @property
    def layers(self) -> list[int]:
        """All of them, ascending."""
        return list(self._stored)

    def stored(self, layer: int) -> int:
        """Pages that the tiers have."""
        return self._stored[layer]

    def renumber(self, change: Callable[[int], int]) -> None:
        """Pages have other numbers: `change` says which. Every workspace is empty."""
        if self._here:
            raise ValueError(f"layers {list(self._here)} are in workspaces")
        self._stored = {layer: change(pages) for layer, pages in self._stored.items()}

    def check_integrity(self) -> None:
        """Raise `RuntimeError` where the books contradict themselves."""
        taken = [resident.workspace for resident in self._here.values()]
        if sorted([*taken, *self._free]) != list(range(self.workspaces)):
            raise RuntimeError(f"workspaces {taken} are taken and {self._free} free, of {self.workspaces}")
        for layer, pages in self._here.items():
            if (pages.dirty | pages.unread) & ~pages.valid or pages.coming & (pages.valid | ~self._stored[layer]):
                raise RuntimeError(f"layer {layer}: {pages}, stored {self._stored[layer]:b}")

    def _leave(self, layer: int) -> Departure:
        resident = self._here[layer]
        if resident.coming:
            raise ValueError(f"pages {resident.coming:b} of layer {layer} are coming: it cannot leave")
        del self._here[layer]
        self._stored[layer] |= resident.dirty
        return Departure(layer, resident.workspace, resident.dirty)
