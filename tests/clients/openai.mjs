// openai-node: node openai.mjs URL '{"calling": [...], "tool": {...}}'
import assert from "node:assert/strict";
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const [url, given] = process.argv.slice(2);
const { calling, reasoning, tool } = JSON.parse(given);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const ask = [{ role: "user", content: "What is the weather in Paris?" }];
const same = { model: "demo", max_tokens: 60 };

// The model calls a tool by itself; the stream begins without text and holds the same call.
const answer = await client.chat.completions.create({ ...same, messages: calling, tools: [tool] });
const call = answer.choices[0].message.tool_calls[0];
assert.equal(call.function.name, "get_weather");
const runner = client.chat.completions.stream({ ...same, messages: calling, tools: [tool] });
const first = [];
runner.on("chunk", (chunk) => first.push(chunk));
const final = await runner.finalMessage();
assert.equal(first[0].choices[0].delta.content, null);
assert.equal(final.tool_calls[0].function.arguments, call.function.arguments);
assert.equal(final.content, null);

// The tool's result goes back; a format is parsed, and a forced call stands beside it.
const result = { role: "tool", tool_call_id: call.id, content: "Sun." };
const back = [...calling, answer.choices[0].message, result];
assert.ok(await client.chat.completions.create({ ...same, messages: back, tools: [tool], tool_choice: "none" }));
const format = zodResponseFormat(z.object({ city: z.enum(["Paris", "Oslo"]) }), "city");
const parsed = await client.chat.completions.parse({ ...same, messages: ask, response_format: format });
assert.match(parsed.choices[0].message.parsed.city, /Paris|Oslo/);
const forced = { tools: [tool], tool_choice: "required", parallel_tool_calls: false };
const both = await client.chat.completions.create({ ...same, messages: ask, response_format: format, ...forced });
assert.equal(both.choices[0].message.tool_calls.length, 1);

// Reasoning, in the field that vLLM's users read.
const thought = await client.chat.completions.create({ ...same, messages: reasoning });
assert.equal(thought.choices[0].message.reasoning_content.trim(), "They want a bird.");

// Responses: a stream, with what agents send by default.
const events = [];
const flat = { type: "function", ...tool.function };
const stream = await client.responses.create({
  model: "demo", input: ask, max_output_tokens: 60, stream: true, include: ["reasoning.encrypted_content"],
  tools: [flat, { type: "web_search" }, { type: "custom", name: "apply_patch" }], tool_choice: "none",
});
for await (const event of stream) events.push(event.type);
assert.equal(events[0], "response.created");
assert.match(events.at(-1), /response.(completed|incomplete)/);

// Many stop strings; typed errors; the list of models.
const stop = Array.from({ length: 12 }, (_, number) => `never ${number}`);
const stopped = await client.completions.create({ model: "demo", prompt: "1 2 3 4", max_tokens: 9, stop: [...stop, "7"] });
assert.equal(stopped.choices[0].finish_reason, "stop");
await assert.rejects(client.chat.completions.create({ ...same, messages: ask, max_tokens: 1e6 }), (error) => {
  return error instanceof OpenAI.BadRequestError && error.code === "context_length_exceeded";
});
for await (const model of client.models.list()) assert.equal(model.id, "demo");
console.log("done");
