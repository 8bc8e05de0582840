"""Decoders by name: how an answer's threads run, and how each thread drafts."""

from collections.abc import Callable, Collection
from pathlib import Path

from apar.decoding.decoder import Decoder
from apar.decoding.drafting import DrafterFactory, NoDrafting
from apar.decoding.errors import DecodingError
from apar.decoding.lade import LadeDrafting, LadeOptions
from apar.decoding.medusa import MedusaDrafting, MedusaOptions
from apar.decoding.medusa_heads import load_heads
from apar.decoding.model import TreeModel
from apar.decoding.ptd import PtdDrafting, PtdOptions
from apar.options import ControlTokens, ForkLimits

FORKING = "apar"
DRAFTING = ("medusa", "ptd", "lade")
DECODERS = ("ar", FORKING, *(name for drafting in DRAFTING for name in (drafting, f"{FORKING}+{drafting}")))


def parts_of(name: str) -> tuple[bool, str | None]:
    """Whether the decoder forks, and how it drafts.

    Raises:
        DecodingError: there is no such decoder.
    """
    if name not in DECODERS:
        raise DecodingError(f"decoder is {name!r}: use one of {', '.join(DECODERS)}")
    parts = name.split("+")
    return parts[0] == FORKING, parts[-1] if parts[-1] in DRAFTING else None


def make_decoder(
    name: str,
    model: TreeModel,
    *,
    control: ControlTokens | None,
    eos_token_ids: Collection[int],
    limits: ForkLimits = ForkLimits(),  # noqa: B008  (frozen)
    max_model_len: int | None = None,
    ptd: PtdOptions = PtdOptions(),  # noqa: B008
    lade: LadeOptions = LadeOptions(),  # noqa: B008
    medusa: Path | None = None,
    medusa_tree: MedusaOptions = MedusaOptions(),  # noqa: B008
) -> Decoder:
    """
    Args:
        control: the model's control tokens; None for a model that cannot fork.
        max_model_len: longest path of a thread in tokens; None: the model's own limit.
        medusa: the folder of trained heads, for the decoders that use them.

    Raises:
        DecodingError: no such decoder, or what it needs is missing; the message says what.
    """
    forks, drafting = parts_of(name)
    factories: dict[str | None, Callable[[], DrafterFactory]] = {
        None: NoDrafting,
        "ptd": lambda: PtdDrafting(ptd, eos_token_ids),
        "lade": lambda: LadeDrafting(lade, eos_token_ids),
        "medusa": lambda: _medusa(name, model, medusa, medusa_tree),
    }
    return Decoder(
        model, factories[drafting](), control, limits, eos_token_ids, max_model_len or model.max_model_len, forks=forks
    )


def _medusa(name: str, model: TreeModel, folder: Path | None, tree: MedusaOptions) -> MedusaDrafting:
    if folder is None:
        raise DecodingError(f"decoder {name} needs trained heads: name their folder (forq train-medusa makes one)")
    return MedusaDrafting(load_heads(folder, model), tree)
