// Vercel's AI SDK with its provider for OpenAI-compatible servers: node ai_sdk.mjs URL '{...}'
import assert from "node:assert/strict";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const [url, given] = process.argv.slice(2);
const { reasoning } = JSON.parse(given);
const provider = createOpenAICompatible({
  name: "tonnage", baseURL: `${url}/v1`, apiKey: "none", includeUsage: true, supportsStructuredOutputs: true,
});
const model = provider("demo");
const same = { model, maxOutputTokens: 60, maxRetries: 0 };
const city = z.object({ city: z.enum(["Paris", "Oslo"]) });
const asked = [];
const tools = {
  get_weather: tool({
    description: "The weather of a city.", inputSchema: city,
    execute: async ({ city }) => { asked.push(city); return "Sun."; },
  }),
  list_ships: tool({ description: "All ships.", inputSchema: z.object({}), execute: async () => "Fram" }),
};
const prompt = "What is the weather in Paris?";

// Text, whole and streamed, with its usage.
const whole = await generateText({ ...same, prompt: "Say hi.", temperature: 0 });
const streamed = streamText({ ...same, prompt: "Say hi.", temperature: 0 });
assert.equal(await streamed.text, whole.text);
assert.equal((await streamed.usage).outputTokens, whole.usage.outputTokens);

// A forced call runs the tool; its result is the second step's.
const steps = await generateText({
  ...same, prompt, tools, toolChoice: { type: "tool", toolName: "get_weather" }, stopWhen: stepCountIs(2),
});
assert.equal(steps.steps[0].toolCalls[0].toolName, "get_weather");
assert.ok(asked.length > 0);

// The stream of a call holds no text block.
const parts = [];
const stream = streamText({ ...same, prompt, tools, toolChoice: { type: "tool", toolName: "list_ships" } });
for await (const part of stream.fullStream) parts.push(part);
assert.deepEqual(parts.filter((part) => part.type.startsWith("text")), []);
const call = parts.find((part) => part.type === "tool-call");
assert.deepEqual([call.toolName, call.input], ["list_ships", {}]);

// An object of a schema; reasoning; many stop sequences.
const { object } = await generateObject({ ...same, prompt, schema: city });
assert.match(object.city, /Paris|Oslo/);
const thought = streamText({ ...same, messages: reasoning });
assert.equal((await thought.reasoningText).trim(), "They want a bird.");
assert.ok((await thought.usage).outputTokenDetails?.reasoningTokens ?? (await thought.usage).reasoningTokens > 0);
const stopSequences = Array.from({ length: 12 }, (_, number) => `never ${number}`);
assert.ok((await generateText({ ...same, prompt, stopSequences })).text);
console.log("done");
