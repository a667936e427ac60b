"""Chat and speech with the official OpenAI client: ``pip install 'openai>=3'``.

python openai_chat.py http://127.0.0.1:8000 speech "What is the capital of France?" answer.wav
"""

from __future__ import annotations

import base64
import os
import sys
import wave

from openai import OpenAI


def main(server: str, model: str, question: str, wav_path: str) -> None:
    """Stream the answer's text to the terminal and its speech to ``wav_path``."""
    client = OpenAI(base_url=f"{server}/v1", api_key=os.environ.get("OPENAI_API_KEY", "unused"))
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        modalities=["text", "audio"],
        audio={"voice": "default", "format": "pcm16"},
        stream=True,
    )
    with wave.open(wav_path, "wb") as wav:
        wav.setnchannels(1)
        wav.setsampwidth(2)
        wav.setframerate(24_000)
        for chunk in stream:
            if not chunk.choices:
                continue
            delta = chunk.choices[0].delta
            print(delta.content or "", end="", flush=True)
            if delta.audio is not None and delta.audio.data:
                wav.writeframes(base64.b64decode(delta.audio.data))
    print(f"\nwrote {wav_path}")


if __name__ == "__main__":
    if len(sys.argv) != 5:
        sys.exit('usage: python openai_chat.py SERVER MODEL "question" answer.wav')
    main(*sys.argv[1:])
