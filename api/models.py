"""The models a job may name: aliases of the configuration, in the shape of OpenAI's list."""

from fastapi import APIRouter

from api.dependencies import SettingsDep
from api.problems import responses
from api.schemas import Model, ModelList
from jobs.errors import NotFound
from jobs.settings import Settings

router = APIRouter(prefix="/v1/models", tags=["models"], responses=responses(401, 403, 429, 500, 503))


@router.get("", operation_id="list_models", summary="The models a job may name")
async def list_models(settings: SettingsDep) -> ModelList:
    """Aliases only: paths and hub names stay with the operator."""
    return ModelList(data=[_described(settings, alias) for alias in sorted(settings.models)])


@router.get(
    "/{model}", operation_id="get_model", summary="One of them", response_model=Model, responses=responses(404, 422)
)
async def get_model(settings: SettingsDep, model: str) -> Model:
    """As `models.retrieve` of OpenAI's clients asks for it."""
    if model not in settings.models:
        raise NotFound(f"no model {model[:80]!r}: there are {', '.join(sorted(settings.models))}")
    return _described(settings, model)


def _described(settings: Settings, alias: str) -> Model:
    model = settings.models[alias]
    return Model(
        id=alias,
        is_default=alias == settings.default_model,
        max_model_len=model.max_model_len,
        default_max_tokens=model.default_max_tokens,
        kv_budget=str(model.kv_budget) if model.kv_budget is not None else None,
    )
