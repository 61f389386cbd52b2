// The tasks of the AI SDK, for any of its language models.

import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import * as z from "zod";
import { FORECAST, MAX_TOKENS, QUESTION, check, run } from "./checks.mjs";

const Weather = z.object({ city: z.enum(["Rome", "Oslo"]), rains: z.boolean() });

export async function runModel(model) {
  const common = { model, maxRetries: 0, maxOutputTokens: MAX_TOKENS };
  const prompt = QUESTION;

  async function chat() {
    const answer = await generateText({ ...common, prompt, system: "Be short." });
    check(answer.text, "there is no text");
    check(["stop", "length"].includes(answer.finishReason), `the finish reason is ${answer.finishReason}`);
    check(answer.usage.outputTokens > 0, "there is no usage");
  }

  async function nextTurn() {
    const messages = [{ role: "user", content: QUESTION }];
    const answer = await generateText({ ...common, messages });
    messages.push(...answer.response.messages, { role: "user", content: "And in Oslo?" });
    check((await generateText({ ...common, messages })).text, "there is no text");
  }

  async function streamedChat() {
    let failure = null;
    const answer = streamText({ ...common, prompt, onError: ({ error }) => (failure = error) });
    let text = "";
    for await (const piece of answer.textStream) text += piece;
    if (failure) throw failure;
    check(text, "there is no text");
    check((await answer.usage).outputTokens > 0, "there is no usage");
  }

  const cities = [];
  const weather = tool({
    description: "Tells it.",
    inputSchema: z.object({ city: z.enum(["Rome", "Oslo"]) }),
    execute: async ({ city }) => {
      cities.push(city);
      return FORECAST;
    },
  });
  // The first step must call the tool. The second step answers with a text.
  const agent = {
    ...common,
    maxOutputTokens: 400,
    prompt,
    tools: { weather },
    stopWhen: stepCountIs(2),
    prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "none" }),
  };

  async function tools() {
    cities.length = 0;
    const answer = await generateText(agent);
    check(answer.steps.length === 2 && cities.length > 0, `there are ${answer.steps.length} steps`);
    check(answer.text, "there is no text");
  }

  async function streamedTools() {
    cities.length = 0;
    let failure = null;
    const answer = streamText({ ...agent, onError: ({ error }) => (failure = error) });
    await answer.consumeStream();
    if (failure) throw failure;
    check((await answer.steps).length === 2 && cities.length > 0, "the tool was not called");
    check(await answer.text, "there is no text");
  }

  async function structuredOutput() {
    const answer = await generateText({
      ...common,
      maxOutputTokens: 400,
      prompt,
      output: Output.object({ schema: Weather }),
    });
    Weather.parse(answer.output);
  }

  await run("ai", [chat, nextTurn, streamedChat, tools, streamedTools, structuredOutput]);
}
