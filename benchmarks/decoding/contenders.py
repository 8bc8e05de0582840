"""A decoder as the command line names it: `ptd`, or with settings of its own, `ptd:width=2:depth=6`."""

from collections.abc import Collection
from dataclasses import dataclass, fields
from pathlib import Path

from apar.decoding import Decoder, TreeModel, make_decoder
from apar.decoding.errors import DecodingError
from apar.decoding.lade import LadeOptions
from apar.decoding.medusa import MedusaOptions
from apar.decoding.ptd import PtdOptions
from apar.decoding.registry import parts_of
from apar.options import ControlTokens, ForkLimits

OPTIONS: dict[str, type[PtdOptions] | type[LadeOptions] | type[MedusaOptions]] = {
    "ptd": PtdOptions,
    "lade": LadeOptions,
    "medusa": MedusaOptions,
}


@dataclass(frozen=True, slots=True)
class Contender:
    spelled: str
    name: str
    settings: tuple[tuple[str, int], ...] = ()

    @property
    def forks(self) -> bool:
        return parts_of(self.name)[0]

    @property
    def compared_with(self) -> str:
        """Whose tokens it must give: without drafting, every decoder is `ar` or `apar`."""
        return "apar" if self.forks else "ar"

    def setting(self, name: str) -> int | None:
        return dict(self.settings).get(name)


def parse(spelled: str) -> Contender:
    """
    Raises:
        DecodingError: no such decoder, or a setting it does not have.
    """
    name, *said = spelled.split(":")
    drafting = parts_of(name)[1]
    known = [field.name for field in fields(OPTIONS[drafting]) if field.type is int] if drafting else []
    settings = []
    for item in said:
        key, _, value = item.partition("=")
        if key not in known or not value.isdecimal():
            raise DecodingError(f"{spelled}: {item!r} is no setting of {name}: use {'=N, '.join(known) or 'none'}")
        settings.append((key, int(value)))
    return Contender(spelled, name, tuple(settings))


def build(
    contender: Contender,
    model: TreeModel,
    control: ControlTokens | None,
    limits: ForkLimits,
    eos_token_ids: Collection[int],
    medusa: Path | None,
) -> Decoder:
    """
    Raises:
        DecodingError: a setting or what the decoder needs.
    """
    drafting, settings = parts_of(contender.name)[1], dict(contender.settings)
    return make_decoder(
        contender.name,
        model,
        control=control,
        limits=limits,
        eos_token_ids=eos_token_ids,
        ptd=PtdOptions(**settings) if drafting == "ptd" else PtdOptions(),
        lade=LadeOptions(**settings) if drafting == "lade" else LadeOptions(),
        medusa_tree=MedusaOptions(**settings) if drafting == "medusa" else MedusaOptions(),
        medusa=medusa,
    )
