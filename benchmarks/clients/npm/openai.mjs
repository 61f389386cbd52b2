// The official client of OpenAI, with chats and responses.

import OpenAI from "openai";
import { zodResponseFormat, zodResponsesFunction, zodTextFormat } from "openai/helpers/zod";
import * as z from "zod";
import { BASE, CITY, FORECAST, KEY, MAX_TOKENS, MODEL, QUESTION, check, checkCity, run } from "./checks.mjs";

const client = new OpenAI({ baseURL: BASE, apiKey: KEY, maxRetries: 0 });
const messages = [{ role: "user", content: QUESTION }];
const definition = { name: "weather", description: "Tells it.", parameters: CITY };
const tools = [{ type: "function", function: definition }];
const Weather = z.object({ city: z.enum(["Rome", "Oslo"]), rains: z.boolean() });

async function models() {
  const ids = [];
  for await (const card of client.models.list()) ids.push(card.id);
  check(ids.includes(MODEL), `the models are ${ids}`);
}

async function chat() {
  const answer = await client.chat.completions.create({ model: MODEL, messages, max_completion_tokens: MAX_TOKENS });
  check(answer.choices[0].message.content, "there is no text");
  check(["stop", "length"].includes(answer.choices[0].finish_reason), "the finish reason is unknown");
  check(answer.usage.completion_tokens > 0, "there is no usage");
}

async function streamedChat() {
  const stream = client.chat.completions.stream({
    model: MODEL,
    messages,
    max_tokens: MAX_TOKENS,
    stream_options: { include_usage: true },
  });
  check(await stream.finalContent(), "there is no text");
  check((await stream.totalUsage()).completion_tokens > 0, "there is no usage");
}

async function tools_() {
  const options = { model: MODEL, tools, max_completion_tokens: 400 };
  const answer = await client.chat.completions.create({
    ...options,
    messages,
    tool_choice: "required",
    parallel_tool_calls: false,
  });
  const message = answer.choices[0].message;
  checkCity(message.tool_calls[0].function.arguments);
  const result = { role: "tool", tool_call_id: message.tool_calls[0].id, content: FORECAST };
  const next = await client.chat.completions.create({
    ...options,
    messages: [...messages, message, result],
    tool_choice: "none",
  });
  check(next.choices[0].message.content, "there is no text");
}

async function toolRunner() {
  const cities = [];
  const weather = (given) => {
    cities.push(given.city);
    return FORECAST;
  };
  const runner = client.chat.completions.runTools(
    {
      model: MODEL,
      messages,
      max_completion_tokens: 400,
      stream: true,
      tool_choice: { type: "function", function: { name: "weather" } },
      tools: [{ type: "function", function: { ...definition, function: weather, parse: JSON.parse } }],
    },
    { maxChatCompletions: 1 },
  );
  await runner.done();
  check(cities.length > 0, "the tool was not called");
}

async function structuredOutput() {
  const answer = await client.chat.completions.parse({
    model: MODEL,
    messages,
    response_format: zodResponseFormat(Weather, "weather"),
  });
  Weather.parse(answer.choices[0].message.parsed);
}

async function responses() {
  const answer = await client.responses.create({ model: MODEL, input: QUESTION, max_output_tokens: MAX_TOKENS });
  check(answer.output_text, "there is no text");
  check(answer.usage.output_tokens > 0, "there is no usage");
}

async function streamedResponses() {
  const stream = client.responses.stream({
    model: MODEL,
    input: QUESTION,
    text: { format: zodTextFormat(Weather, "weather") },
  });
  Weather.parse((await stream.finalResponse()).output_parsed);
}

async function responsesWithTools() {
  const weather = zodResponsesFunction({ name: "weather", parameters: z.object({ city: z.enum(["Rome", "Oslo"]) }) });
  const options = { model: MODEL, tools: [weather], max_output_tokens: 400 };
  const input = [{ role: "user", content: QUESTION }];
  const answer = await client.responses.parse({ ...options, input, tool_choice: "required" });
  const calls = answer.output.filter((item) => item.type === "function_call");
  calls.forEach((call) => checkCity(call.parsed_arguments));
  const results = calls.map((call) => ({ type: "function_call_output", call_id: call.call_id, output: FORECAST }));
  const items = [...input, ...answer.output, ...results];
  const next = await client.responses.create({ ...options, input: items, tool_choice: "none" });
  check(next.output_text, "there is no text");
}

Object.defineProperty(tools_, "name", { value: "tools" });
await run("openai", [
  ...[models, chat, streamedChat, tools_, toolRunner, structuredOutput],
  ...[responses, streamedResponses, responsesWithTools],
]);
