"""Which decodings a job may ask for, by the backend of its model; and what the configuration may say of backends."""

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from batches import acquire, submit_rows
from sqlalchemy import select

from db.models import Job
from db.session import Database
from jobs import results
from jobs.errors import BadInput
from jobs.forking import DECODINGS, VLLM_DECODINGS, check_decoding, drafter_of, forks
from jobs.reference_settings import LadeSettings, PtdSettings, ReferenceSettings
from jobs.settings import Settings, get_settings


@pytest.mark.parametrize("decoding", DECODINGS)
def test_the_reference_backend_has_every_decoding(database: Database, settings: Settings, decoding: str) -> None:
    job_id = submit_rows(database, settings, 1, model="reference", decoding=decoding)
    with database.read() as connection:
        assert connection.scalar(select(Job.decoding).where(Job.id == job_id)) == decoding
    assert results.load(database, acquire(database, model="reference")).decoding == decoding


@pytest.mark.parametrize("decoding", sorted(set(DECODINGS) - set(VLLM_DECODINGS)))
@pytest.mark.parametrize("model", ["smollm2-135m", "forking"])
def test_vllm_has_two_of_them(database: Database, settings: Settings, model: str, decoding: str) -> None:
    with pytest.raises(BadInput) as caught:
        submit_rows(database, settings, 1, model=model, decoding=decoding)
    assert str(caught.value) == (
        f"decoding is {decoding!r}, which model {model!r} does not have on vLLM: use apar or ar, or say "
        f'backend = "reference" in [models.{model}] of forq.toml'
    )


@pytest.mark.parametrize(
    ("model", "decoding", "message"),
    [
        (
            "reference",
            "beam",
            "decoding is 'beam': use ar, apar, medusa, apar+medusa, ptd, apar+ptd, lade or apar+lade",
        ),
        ("reference", "ptd+apar", "decoding is 'ptd+apar': use ar, apar"),
        ("reference", "", "decoding is '': use ar, apar"),
        ("forking", "APAR", "decoding is 'APAR': use apar or ar"),
        (
            "plain-reference",
            "medusa",
            "model 'plain-reference' has no Medusa heads: name the folder of forq train-medusa as medusa in "
            "[models.plain-reference.reference] of forq.toml, or use --decoding ptd",
        ),
        ("plain-reference", "apar+medusa", "or use --decoding apar+ptd"),
        ("plain-reference", "apar", "name fork_token and child_token in [models.plain-reference] of forq.toml, or use "
         "--decoding ar"),
        ("plain-reference", "apar+ptd", "model 'plain-reference' is not known to fork"),
        ("plain-reference", "apar+lade", "or use --decoding lade"),
    ],
)  # fmt: skip
def test_what_the_model_is_not_made_for_is_refused_with_the_remedy(
    database: Database, settings: Settings, model: str, decoding: str, message: str
) -> None:
    with pytest.raises(BadInput) as caught:
        submit_rows(database, settings, 1, model=model, decoding=decoding)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_names_are_those_of_the_decoding_library() -> None:
    from apar.decoding import DECODERS

    assert set(DECODINGS) == set(DECODERS)
    assert set(DECODINGS) == {f"{apar}{name}" for apar in ("", "apar+") for name in ("medusa", "ptd", "lade")} | {
        "ar",
        "apar",
    }
    assert {name for name in DECODINGS if forks(name)} == {"apar", "apar+medusa", "apar+ptd", "apar+lade"}
    assert [drafter_of(name) for name in ("ar", "apar", "ptd", "apar+lade")] == [None, None, "ptd", "lade"]


def test_the_configuration_page_shows_the_decoders_own_values() -> None:
    """Which the settings leave to the decoders."""
    from apar.decoding.lade import LadeOptions
    from apar.decoding.ptd import PtdOptions

    page = (Path(__file__).resolve().parents[2] / "docs" / "configuration.md").read_text()
    block = page.partition("### The reference backend")[2].partition("```toml")[2].partition("```")[0]
    shown = tomllib.loads(block)["models"]["tail"]["reference"]
    assert ReferenceSettings.model_validate(shown).device == ReferenceSettings().device
    for said, options in ((shown["ptd"], PtdOptions()), (shown["lade"], LadeOptions())):
        assert said == {name: getattr(options, name) for name in said}
    assert set(shown["ptd"]) == set(PtdSettings.model_fields)
    assert set(shown["lade"]) == set(LadeSettings.model_fields)


def test_judging_a_decoding_needs_no_torch(settings: Settings, tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from jobs.forking import check_decoding;"
        "from jobs.settings import ModelAlias, Settings;"
        "settings = Settings(models={'m': ModelAlias(path=Path('m'), backend='reference')});"
        "check_decoding(settings, 'm', 'ptd'); print({'torch', 'transformers', 'apar'} & set(sys.modules))"
    )
    root = str(Path(__file__).resolve().parents[2])
    said = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "set()"


# --- configuration ------------------------------------------------------------------------------------------------


@pytest.fixture
def configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Reads a forq.toml as every command does."""
    monkeypatch.chdir(tmp_path)

    def read(text: str) -> Settings:
        (tmp_path / "forq.toml").write_text(text)
        monkeypatch.setenv("FORQ_CONFIG", str(tmp_path / "forq.toml"))
        get_settings.cache_clear()
        return get_settings()

    yield read
    get_settings.cache_clear()


def test_a_reference_alias_says_where_it_runs_and_how_it_drafts(configured: Any) -> None:
    settings = configured(
        """
        [models.tail]
        path = "/models/m"
        backend = "reference"
        [models.tail.reference]
        device = "cuda:1"
        medusa = "/models/heads"
        ptd = { width = 5, depth = 3, max_nodes = 64 }
        lade = { window = 4, ngram = 3, guesses = 2 }
        """
    )
    said = settings.model("tail").reference
    assert (said.device, said.medusa) == ("cuda:1", Path("/models/heads"))
    assert said.ptd.model_dump() == {"width": 5, "depth": 3, "max_nodes": 64}
    assert said.lade.model_dump() == {"window": 4, "ngram": 3, "guesses": 2}
    check_decoding(settings, "tail", "medusa")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('backend = "torch"', "models.tail.backend: Input should be 'vllm' or 'reference'"),
        ('backend = "reference"\n[models.tail.reference]\nwidth = 3', "models.tail.reference.width: Extra inputs"),
        ('backend = "reference"\nreference.ptd.widht = 3', "models.tail.reference.ptd.widht: Extra inputs"),
        ('backend = "reference"\nreference.ptd.width = 0', "models.tail.reference.ptd.width: Input should be greater"),
        ('backend = "reference"\nreference.lade.ngram = 2', "models.tail.reference.lade.ngram: Input should be"),
        ('backend = "reference"\nreference.device = "gpu"', "models.tail.reference.device: String should match"),
        ('backend = "reference"\nengine.max_num_seqs = 4', "engine stands beside backend 'reference'"),
        ("reference.ptd.width = 3", "reference stands beside backend 'vllm'"),
    ],
)
def test_what_a_backend_does_not_have_is_refused(configured: Any, text: str, message: str) -> None:
    with pytest.raises(BadInput) as caught:
        configured(f'[models.tail]\npath = "/models/m"\n{text}\n')
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
