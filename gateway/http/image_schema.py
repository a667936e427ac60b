"""OpenAI's image requests as our own, from JSON or a form. Pure."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from gateway import validation
from gateway.graph import PipelineGraph
from gateway.http.chat_schema import read_prompt_options, read_timeout
from gateway.http.content_parts import NOT_OFFERED
from gateway.http.fields import Fields
from gateway.http.media import media_part
from gateway.http.multipart import Form, form_values
from gateway.http.session_fields import SESSION_FIELDS, read_session
from omni.v1 import prompt_pb2, sampling_pb2
from omnicore import errors

MAX_PICTURES = 10
"""Of one request, as OpenAI has it."""
MAX_INPUTS = 16
"""Pictures to edit, as OpenAI has it."""
_SIZE = re.compile(r"([1-9]\d{0,4})x([1-9]\d{0,4})")

_INTEGERS = frozenset(("n", "seed", "num_inference_steps", "partial_images", "output_compression", "priority"))
_NUMBERS = frozenset(("guidance_scale", "timeout", "true_cfg_scale"))
_BOOLEANS = frozenset(("stream",))
# What would change the pictures and is not offered, with the values that ask for nothing.
_REFUSED: dict[str, tuple[Any, ...]] = {
    "response_format": ("b64_json",),
    "output_format": ("png",),
    "output_compression": (100,),
    "quality": ("auto",),
    "style": (),
    "background": ("auto", "opaque"),
    "moderation": ("auto",),
    "input_fidelity": (),
    "partial_images": (0,),
    "stream": (False,),
    "true_cfg_scale": (),
    "mask": (),
    "image": (),
}
_KNOWN = (
    _REFUSED.keys()
    | {"model", "prompt", "n", "size", "seed", "num_inference_steps", "guidance_scale", "negative_prompt"}
    | SESSION_FIELDS
    | {"bot_task", "user", "timeout", "priority"}
)


@dataclasses.dataclass(slots=True)
class ImageRequest:
    """A valid body of /v1/images/generations or /v1/images/edits."""

    graph: PipelineGraph
    task: str
    prompt: prompt_pb2.Prompt
    sampling: sampling_pb2.SamplingParams
    n: int
    session_id: str
    timeout_s: float
    priority: int | None
    strict_session: bool | None = None
    """A session whose replica is gone is refused; None: as the pipeline says."""


def parse_generation(body: object, pipelines: Mapping[str, PipelineGraph], prompt_limit_bytes: int) -> ImageRequest:
    """Read and check a JSON body. Raises ``InvalidRequestError`` and ``NotFoundError``."""
    return _parse(Fields(body), [], pipelines, prompt_limit_bytes)


def parse_edit(form: Form, pipelines: Mapping[str, PipelineGraph], prompt_limit_bytes: int) -> ImageRequest:
    """Read and check a form. Raises ``InvalidRequestError`` and ``NotFoundError``."""
    fields = Fields(form_values(form, integers=_INTEGERS, numbers=_NUMBERS, booleans=_BOOLEANS))
    form.only_files(("image", "mask"))
    if any(upload.name == "mask" for upload in form.files):
        raise errors.InvalidRequestError.field("mask", NOT_OFFERED, reason="UNSUPPORTED_FIELD")
    if not 1 <= len(form.files) <= MAX_INPUTS:
        raise errors.InvalidRequestError.field("image", f"1 to {MAX_INPUTS} files, got {len(form.files)}")
    media = [
        media_part("image" if len(form.files) == 1 else f"image[{index}]", "image", upload.data)
        for index, upload in enumerate(form.files)
    ]
    return _parse(fields, media, pipelines, prompt_limit_bytes)


def _parse(
    fields: Fields, media: list[prompt_pb2.MediaPart], pipelines: Mapping[str, PipelineGraph], prompt_limit_bytes: int
) -> ImageRequest:
    graph, task = _pipeline(pipelines, fields.string("model", "") or "")
    text = fields.string("prompt", required=True) or ""
    if not text.strip():
        raise errors.InvalidRequestError.field("prompt", "must not be empty")
    prompt = prompt_pb2.Prompt()
    # The same words as a chat of one turn: /v1/chat/completions gives the same picture.
    message = prompt.chat.messages.add(role="user")
    for part in media:
        message.parts.add(media=part)
    message.parts.add(text=text)
    read_prompt_options(fields, prompt)
    validation.check_prompt(prompt, prompt_limit_bytes, "image" if media else "prompt")
    n = fields.integer("n")
    if n is not None and not 1 <= n <= MAX_PICTURES:
        raise errors.InvalidRequestError.field("n", f"must be 1 to {MAX_PICTURES}, got {n}")
    session_id, strict_session = read_session(fields)
    fields.refuse(_REFUSED, NOT_OFFERED)
    fields.finish(_KNOWN)
    return ImageRequest(
        graph, task, prompt, _sampling(fields), n or 1, session_id, read_timeout(fields), fields.integer("priority"),
        strict_session,
    )  # fmt: skip


def _pipeline(pipelines: Mapping[str, PipelineGraph], model: str) -> tuple[PipelineGraph, str]:
    """The pipeline, and the task of it that makes pictures. ``model`` may be left out, as at OpenAI, where only one
    pipeline makes any."""
    if not model:
        able = sorted(name for name, graph in pipelines.items() if _task(graph))
        if len(able) != 1:
            listed = ", ".join(able) or "none"
            raise errors.InvalidRequestError.field("model", f"required; models that make images: {listed}")
        model = able[0]
    graph = validation.find_pipeline(pipelines, model)
    task = _task(graph)
    if not task:
        offered = ", ".join(graph.modalities())
        raise errors.InvalidRequestError.field(
            "model", f"{graph.name!r} makes no images; it offers: {offered}", reason="UNSUPPORTED_MODALITY"
        )
    return graph, task


def _task(graph: PipelineGraph) -> str:
    for task in ("image", "chat"):
        if task in graph.entrypoints and "image" in graph.modalities(task):
            return task
    return ""


def _sampling(fields: Fields) -> sampling_pb2.SamplingParams:
    sampling = sampling_pb2.SamplingParams()
    if (seed := fields.integer("seed")) is not None:
        sampling.seed = seed
    if (steps := fields.integer("num_inference_steps")) is not None:
        validation.check_range("num_inference_steps", steps, 1, 2**32 - 1)
        sampling.num_inference_steps = steps
    if (scale := fields.number("guidance_scale")) is not None:
        sampling.guidance_scale = scale
    size = fields.string("size", "auto") or "auto"
    if size != "auto":
        if (found := _SIZE.fullmatch(size)) is None:
            raise errors.InvalidRequestError.field("size", f'must be WIDTHxHEIGHT or "auto", got {size[:40]!r}')
        sampling.width, sampling.height = int(found[1]), int(found[2])
        for side in (sampling.width, sampling.height):
            validation.check_range("size", side, 1, validation.MAX_IMAGE_SIDE)
    validation.check_sampling(sampling)
    return sampling
