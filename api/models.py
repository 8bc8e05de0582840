"""The models a job may name: aliases of the configuration, in the shape of OpenAI's list."""

from fastapi import APIRouter

from api.dependencies import SettingsDep
from api.problems import responses
from api.schemas import Model, ModelList

router = APIRouter(prefix="/v1/models", tags=["models"], responses=responses(401, 403, 429, 500, 503))


@router.get("", operation_id="list_models", summary="The models a job may name")
async def list_models(settings: SettingsDep) -> ModelList:
    """Aliases only: paths and hub names stay with the operator."""
    return ModelList(
        data=[
            Model(
                id=alias,
                is_default=alias == settings.default_model,
                max_model_len=model.max_model_len,
                default_max_tokens=model.default_max_tokens,
                kv_budget=str(model.kv_budget) if model.kv_budget is not None else None,
            )
            for alias, model in sorted(settings.models.items())
        ]
    )
