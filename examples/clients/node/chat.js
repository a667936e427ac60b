// Streams a chat answer from a gateway over gRPC, and writes its speech to a WAV file if one is named.
//
//   npm install
//   node chat.js ADDRESS MODEL "question" [answer.wav]
//
// The .proto files are loaded as they are; google/api/annotations.proto comes with protobufjs.
"use strict";

const fs = require("fs");
const path = require("path");
const grpc = require("@grpc/grpc-js");
const protoLoader = require("@grpc/proto-loader");

const PROTOS = process.env.OMNI_PROTOS || path.join(__dirname, "..", "..", "..", "protos");

function loadService() {
  const definition = protoLoader.loadSync("omni/v1/inference_service.proto", {
    includeDirs: [PROTOS, path.dirname(require.resolve("protobufjs/package.json"))],
    longs: Number,
    enums: String,
    defaults: true,
    oneofs: true,
  });
  return grpc.loadPackageDefinition(definition).omni.v1.InferenceService;
}

function wavHeader(dataBytes, sampleRateHz, channels) {
  const header = Buffer.alloc(44);
  header.write("RIFF", 0);
  header.writeUInt32LE(36 + dataBytes, 4);
  header.write("WAVEfmt ", 8);
  header.writeUInt32LE(16, 16); // bytes of the format chunk
  header.writeUInt16LE(1, 20); // PCM
  header.writeUInt16LE(channels, 22);
  header.writeUInt32LE(sampleRateHz, 24);
  header.writeUInt32LE(sampleRateHz * channels * 2, 28);
  header.writeUInt16LE(channels * 2, 32);
  header.writeUInt16LE(16, 34); // bits per sample
  header.write("data", 36);
  header.writeUInt32LE(dataBytes, 40);
  return header;
}

function main() {
  const [address, model, question, wavPath] = process.argv.slice(2);
  if (!address || !model || !question) {
    console.error('usage: node chat.js ADDRESS MODEL "question" [answer.wav]');
    process.exit(2);
  }
  const InferenceService = loadService();
  const client = new InferenceService(address, grpc.credentials.createInsecure());
  const call = client.Generate({
    model,
    prompt: { chat: { messages: [{ role: "user", parts: [{ text: question }] }] } },
    modalities: wavPath ? ["text", "audio"] : ["text"],
  });
  const audio = [];
  let info = { sampleRateHz: 24000, channels: 1 };
  call.on("data", (response) => {
    process.stdout.write(response.text);
    if (response.mediaInfo) info = response.mediaInfo;
    if (response.media.length > 0) audio.push(response.media);
    if (response.finish) console.log(`\n[${response.finish.reason}, ${response.finish.completionTokens} tokens]`);
  });
  call.on("error", (error) => {
    console.error(`error: ${grpc.status[error.code]}: ${error.details}`);
    process.exitCode = 1;
    client.close();
  });
  call.on("end", () => {
    if (wavPath) {
      const pcm = Buffer.concat(audio);
      fs.writeFileSync(wavPath, Buffer.concat([wavHeader(pcm.length, info.sampleRateHz, info.channels), pcm]));
      console.log(`wrote ${wavPath}: ${(pcm.length / 2 / info.channels / info.sampleRateHz).toFixed(1)} s`);
    }
    client.close();
  });
}

main();
