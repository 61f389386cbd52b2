// The official client of Anthropic's Messages API.

import Anthropic from "@anthropic-ai/sdk";
import { betaZodTool } from "@anthropic-ai/sdk/helpers/beta/zod";
import { zodOutputFormat } from "@anthropic-ai/sdk/helpers/zod";
import * as z from "zod";
import { CITY, FORECAST, KEY, MAX_TOKENS, MODEL, QUESTION, URL_OF_SERVER, check, checkCity, run } from "./checks.mjs";

const client = new Anthropic({ baseURL: URL_OF_SERVER, apiKey: KEY, maxRetries: 0 });
const messages = [{ role: "user", content: QUESTION }];
const tools = [{ name: "weather", description: "Tells it.", input_schema: CITY }];
const City = z.object({ city: z.enum(["Rome", "Oslo"]) });

async function chat() {
  const answer = await client.messages.create({ model: MODEL, max_tokens: MAX_TOKENS, messages, system: "Be short." });
  check(answer.content[0].text, "there is no text");
  check(["end_turn", "max_tokens"].includes(answer.stop_reason), "the stop reason is unknown");
  check(answer.usage.output_tokens > 0, "there is no usage");
}

async function streamedChat() {
  const stream = client.messages.stream({ model: MODEL, max_tokens: MAX_TOKENS, messages });
  check(await stream.finalText(), "there is no text");
}

async function calls() {
  const options = { model: MODEL, max_tokens: 400, tools };
  const answer = await client.messages.create({ ...options, messages, tool_choice: { type: "any" } });
  const uses = answer.content.filter((block) => block.type === "tool_use");
  uses.forEach((use) => checkCity(use.input));
  const results = uses.map((use) => ({ type: "tool_result", tool_use_id: use.id, content: FORECAST }));
  const turns = [...messages, { role: "assistant", content: answer.content }, { role: "user", content: results }];
  const next = await client.messages.create({ ...options, messages: turns, tool_choice: { type: "none" } });
  check(next.content.length > 0, "there is no content");
}

async function streamedCalls() {
  const choice = { type: "tool", name: "weather", disable_parallel_tool_use: true };
  const stream = client.messages.stream({ model: MODEL, max_tokens: 400, messages, tools, tool_choice: choice });
  const [use] = (await stream.finalMessage()).content.filter((block) => block.type === "tool_use");
  checkCity(use.input);
}

async function toolRunner() {
  const cities = [];
  const weather = betaZodTool({
    name: "weather",
    description: "Tells it.",
    inputSchema: City,
    run: ({ city }) => {
      cities.push(city);
      return FORECAST;
    },
  });
  const runner = client.beta.messages.toolRunner({
    model: MODEL,
    max_tokens: 400,
    messages,
    tools: [weather],
    tool_choice: { type: "any" },
    max_iterations: 2,
  });
  await runner.runUntilDone();
  check(cities.length > 0, "the tool was not called");
}

async function structuredOutput() {
  const format = zodOutputFormat(City);
  const answer = await client.messages.parse({ model: MODEL, max_tokens: 400, messages, output_config: { format } });
  City.parse(answer.parsed_output);
}

async function countTokens() {
  const count = await client.messages.countTokens({ model: MODEL, messages, tools });
  check(count.input_tokens > 0, "there are no tokens");
}

Object.defineProperty(calls, "name", { value: "tools" });
Object.defineProperty(streamedCalls, "name", { value: "streamedTools" });
await run("@anthropic-ai/sdk", [
  ...[chat, streamedChat, calls, streamedCalls, toolRunner, structuredOutput, countTokens],
]);
