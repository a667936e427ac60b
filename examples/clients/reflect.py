"""Any RPC of a server with reflection, without generated code: ``pip install grpcio-reflection``. As grpcurl does.

python reflect.py ADDRESS list                                                # services
python reflect.py ADDRESS describe omni.v1.InferenceService                   # methods, or the fields of a message
python reflect.py ADDRESS call omni.v1.InferenceService/ListModels '{}'       # a call, with JSON
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import grpc
from google.protobuf import json_format
from google.protobuf.descriptor import Descriptor, FieldDescriptor, ServiceDescriptor
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase


def main(address: str, verb: str, name: str = "", body: str = "{}") -> None:
    """Do what the command line says, and print it."""
    with grpc.insecure_channel(address) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        pool = DescriptorPool(database)
        if verb == "list":
            print(*sorted(database.get_services()), sep="\n")
        elif verb == "describe":
            print(*describe(pool, name), sep="\n")
        else:
            call(channel, pool, name, body)


def describe(pool: DescriptorPool, name: str) -> Iterator[str]:
    """A service's methods, or a message's fields."""
    try:
        service: ServiceDescriptor = pool.FindServiceByName(name)
    except KeyError:
        message: Descriptor = pool.FindMessageTypeByName(name)
        for field in message.fields:
            yield f"{field.number:>3} {field.json_name}: {'repeated ' if field.is_repeated else ''}{kind(field)}"
        return
    for method in service.methods:
        sent = ("stream " if method.client_streaming else "") + method.input_type.full_name
        got = ("stream " if method.server_streaming else "") + method.output_type.full_name
        yield f"{method.name}({sent}) → {got}"


def kind(field: FieldDescriptor) -> str:
    """A field's type as the proto calls it."""
    if field.message_type is not None:
        return field.message_type.full_name
    if field.enum_type is not None:
        return " | ".join(value.name for value in field.enum_type.values)
    names = {v: k for k, v in vars(FieldDescriptor).items() if k.startswith("TYPE_")}
    return names.get(field.type, "TYPE_?").removeprefix("TYPE_").lower()


def call(channel: grpc.Channel, pool: DescriptorPool, name: str, body: str) -> None:
    """Make one call and print its responses, a line of JSON each."""
    service, _, rpc = name.partition("/")
    method = pool.FindServiceByName(service).methods_by_name[rpc]
    request = json_format.Parse(body, GetMessageClass(method.input_type)(), descriptor_pool=pool)
    response_class = GetMessageClass(method.output_type)
    make = channel.unary_stream if method.server_streaming else channel.unary_unary
    answer: Any = make(
        f"/{name}",
        request_serializer=lambda message: message.SerializeToString(),
        response_deserializer=response_class.FromString,
    )(request)
    for response in answer if method.server_streaming else [answer]:
        print(json.dumps(json_format.MessageToDict(response, descriptor_pool=pool)), flush=True)


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4, 5) or sys.argv[2] not in ("list", "describe", "call"):
        sys.exit("usage: python reflect.py ADDRESS list | describe NAME | call SERVICE/METHOD [JSON]")
    try:
        main(*sys.argv[1:])
    except grpc.RpcError as error:
        sys.exit(f"{error.code().name}: {error.details()}")
    except (KeyError, json_format.ParseError) as error:
        sys.exit(f"no such thing: {error}")
