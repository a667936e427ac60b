"""``omnictl chat``: one question, answered as it is made."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable

from omni.v1 import sampling_pb2
from omnictl import ask, connect, output
from omnictl.commands.base import Commands, add_output_flag, settings_of
from omnictl.parser import usage_error


def add(commands: Commands) -> None:
    """Add ``chat``."""
    parser = commands.add(
        "chat",
        _run,
        description="Ask a pipeline something and stream its answer.",
        examples=(
            'omnictl chat speech "Why is the sky blue?"',
            "# hear it, too",
            'omnictl chat speech "Why is the sky blue?" --audio answer.wav',
            'omnictl chat speech "Why is the sky blue?" --audio - | aplay',
            "# the question from a file, the answer for a program",
            "omnictl chat speech - -o json < question.txt",
        ),
        notes="The answer goes to standard output, a line with its timings to standard error.",
    )
    parser.add_argument("pipeline", metavar="PIPELINE", help="who to ask")
    parser.completes["pipeline"] = "pipeline"
    parser.add_argument("text", metavar="TEXT", help='what to ask; "-" reads standard input')
    add_question_flags(parser)
    add_output_flag(parser, ("text", "json"))


def add_question_flags(parser: argparse._ActionsContainer) -> None:
    """Flags that say how to answer; ``sampling_of`` and ``question_of`` read them."""
    parser.add_argument("--audio", metavar="FILE", default="", help='write the spoken answer there as WAV; "-": stdout')
    parser.add_argument("--system", metavar="TEXT", default="", help="system message")
    parser.add_argument("--max-tokens", metavar="N", help="most tokens of the answer")
    parser.add_argument("--temperature", metavar="X", help="0 is greedy")
    parser.add_argument("--top-p", metavar="X", help="above 0, at most 1")
    parser.add_argument("--seed", metavar="N", help="same seed, same question: same answer")
    parser.add_argument("--stop", metavar="TEXT", action="append", default=[], help="end before this text; repeatable")
    parser.add_argument("--voice", metavar="NAME", default="", help="voice of the speech, instead of the model's own")
    parser.add_argument("--session", metavar="ID", default="", help="questions of one session go to the same replicas")


def question_of(args: argparse.Namespace, pipeline: str, text: str) -> ask.Question:
    """The question that the flags describe. Raises ``InvalidRequestError``."""
    if not text.strip():
        raise usage_error("TEXT: the question is empty", f"omnictl {args.command}")
    ask.check_audio_target(args.audio)
    return ask.Question(
        pipeline=pipeline,
        text=text,
        system=args.system,
        audio=args.audio,
        sampling=_sampling(args),
        voice=args.voice,
        session=args.session,
    )


async def _run(args: argparse.Namespace) -> int:
    settings = settings_of(args)
    text = sys.stdin.read() if args.text == "-" else args.text
    question = question_of(args, args.pipeline, text)
    if args.output == "json" and question.audio == "-":
        raise usage_error("--audio -: standard output cannot carry both speech and JSON", "omnictl chat")
    text_to = None if args.output == "json" else sys.stderr if question.audio == "-" else sys.stdout
    async with connect.gateway(settings) as gateway:
        answer = await ask.ask(gateway, question, text_to=text_to)
    if args.output == "json":
        output.print_json(answer.to_json())
    else:
        print(answer.summary(question.audio), file=sys.stderr)
    return 0


def _sampling(args: argparse.Namespace) -> sampling_pb2.SamplingParams:
    command = f"omnictl {args.command}"
    sampling = sampling_pb2.SamplingParams(stop=args.stop)
    if args.max_tokens is not None:
        sampling.max_tokens = _whole("--max-tokens", args.max_tokens, 1, 2**32 - 1, command)
    if args.seed is not None:
        sampling.seed = _whole("--seed", args.seed, -(2**63), 2**63 - 1, command)
    if args.temperature is not None:
        sampling.temperature = _real("--temperature", args.temperature, lambda x: x >= 0, "0 or more", command)
    if args.top_p is not None:
        sampling.top_p = _real("--top-p", args.top_p, lambda x: 0 < x <= 1, "above 0 and at most 1", command)
    return sampling


def _whole(flag: str, text: str, low: int, high: int, command: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise usage_error(f"{flag}: must be a whole number, got {text!r}", command) from None
    if not low <= value <= high:
        raise usage_error(f"{flag}: must be {low} to {high}, got {text!r}", command)
    return value


def _real(flag: str, text: str, accepts: Callable[[float], bool], wanted: str, command: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise usage_error(f"{flag}: must be a number, got {text!r}", command) from None
    if not math.isfinite(value) or not accepts(value):
        raise usage_error(f"{flag}: must be {wanted}, got {text!r}", command)
    return value
