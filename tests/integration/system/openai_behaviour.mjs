// What OpenAI's Node client does with our answers: prints one JSON line of findings. Run beside its node_modules.
import OpenAI, { toFile } from "openai";

const [server, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${server}/v1`, apiKey: "unused", maxRetries: 0, timeout: 40_000 });
const messages = [{ role: "user", content: "Hello?" }];
const found = { errors: {} };

async function failure(name, work) {
  try {
    await work();
    found.errors[name] = "none";
  } catch (error) {
    found.errors[name] = [error.constructor.name, error.status ?? null, error.code ?? null, error.param ?? null];
  }
}

found.models = [];
for await (const one of client.models.list()) found.models.push(one.id);

const whole = await client.chat.completions.create({ model, messages, n: 2, seed: 1 });
found.whole = whole.choices.map((choice) => choice.message.content);
found.streamed = ["", ""];
const stream = await client.chat.completions.create({ model, messages, n: 2, seed: 1, stream: true });
for await (const chunk of stream)
  for (const choice of chunk.choices) found.streamed[choice.index] += choice.delta.content ?? "";

const speech = await client.audio.speech.create({ model, voice: "default", input: "Hello.", response_format: "wav" });
found.riff = Buffer.from(await speech.arrayBuffer()).subarray(0, 4).toString();

await failure("field", () => client.chat.completions.create({ model, messages, top_p: 5 }));
await failure("model", () => client.chat.completions.create({ model: "nope", messages }));
await failure("modality", () => client.chat.completions.create({ model, messages, modalities: ["video"] }));
await failure("images", () => client.images.generate({ model, prompt: "x" }));
const file = await toFile(Buffer.from("RIFF....WAVEfmt "), "a.wav");
await failure("transcription", () => client.audio.transcriptions.create({ model, file }));

// Leaving a stream early ends it, and the client goes on.
const left = await client.chat.completions.create({ model, messages, stream: true });
for await (const chunk of left) if (chunk.choices[0]?.delta?.content) break;
found.after = (await client.chat.completions.create({ model, messages, max_tokens: 3 })).choices[0].finish_reason;

console.log(JSON.stringify(found));
