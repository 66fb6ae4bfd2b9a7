"""What all request bodies have in common."""

from __future__ import annotations

import json
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError


class RequestBody(BaseModel):
    """A JSON body whose values have the types they should have: "5" is no number."""

    model_config = ConfigDict(strict=True)

    @model_validator(mode="before")
    @classmethod
    def check_values(cls, body: Any) -> Any:
        # JSON can spell half a character ("\ud800"), which neither a tokenizer nor a database takes, and a number that
        # no float holds (1e999); Python's parser takes NaN as well, and no reply could repeat it.
        try:
            json.dumps(body, ensure_ascii=False, allow_nan=False).encode()
        except UnicodeEncodeError as error:
            half = repr(error.object[error.start])
            raise PydanticCustomError(
                "unicode", "The body holds {half}, which is not unicode.", {"half": half}
            ) from None
        except ValueError:
            raise PydanticCustomError("finite", "The body holds a number that is not finite or too large.") from None
        return body
