"""The OpenAPI document, behind the same door as what it describes. FastAPI's own route would be open."""

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

router = APIRouter()


@router.get("/openapi.json", include_in_schema=False)
async def get_description(request: Request) -> Response:
    return JSONResponse(request.app.openapi())
