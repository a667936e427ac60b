"""Chat over gRPC with the generated stubs: ``pip install omniplane``.

python grpc_chat.py 127.0.0.1:8001 speech "What is the capital of France?"
"""

from __future__ import annotations

import sys

import grpc

from omni.v1 import inference_service_pb2 as pb
from omni.v1 import inference_service_pb2_grpc as pb_grpc
from omni.v1 import prompt_pb2


def main(address: str, model: str, question: str) -> None:
    """Stream the answer's text to the terminal."""
    message = prompt_pb2.ChatMessage(role="user", parts=[prompt_pb2.ContentPart(text=question)])
    request = pb.GenerateRequest(
        model=model,
        prompt=prompt_pb2.Prompt(chat=prompt_pb2.ChatPrompt(messages=[message])),
        modalities=["text"],
    )
    with grpc.insecure_channel(address) as channel:
        for response in pb_grpc.InferenceServiceStub(channel).Generate(request):
            print(response.text, end="", flush=True)
            if response.HasField("finish"):
                print(f"\n[{response.finish.reason}, {response.finish.completion_tokens} tokens]")


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit('usage: python grpc_chat.py ADDRESS MODEL "question"')
    try:
        main(*sys.argv[1:])
    except grpc.RpcError as error:
        sys.exit(f"{error.code().name}: {error.details()}")
