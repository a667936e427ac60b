// The same with OpenAI's own Node client: streams the answer's text, then shows how an error looks.
//
//   npm install
//   node openai_chat.mjs http://127.0.0.1:8000 MODEL "question"
import OpenAI from "openai";

const [server, model, question] = process.argv.slice(2);
if (!server || !model || !question) {
  console.error('usage: node openai_chat.mjs SERVER MODEL "question"');
  process.exit(2);
}
const client = new OpenAI({ baseURL: `${server}/v1`, apiKey: process.env.OPENAI_API_KEY || "unused" });

try {
  const stream = await client.chat.completions.create({
    model,
    messages: [{ role: "user", content: question }],
    stream: true,
    stream_options: { include_usage: true },
  });
  for await (const chunk of stream) {
    process.stdout.write(chunk.choices[0]?.delta?.content ?? "");
    if (chunk.choices[0]?.finish_reason) process.stdout.write(`\n[${chunk.choices[0].finish_reason}`);
    if (chunk.usage) console.log(`, ${chunk.usage.completion_tokens} tokens]`);
  }
} catch (error) {
  if (!(error instanceof OpenAI.APIError)) throw error;
  console.error(`error: ${error.constructor.name}: ${error.status} ${error.code}: ${error.message}`);
  process.exitCode = 1;
}
