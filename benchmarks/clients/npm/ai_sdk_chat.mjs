// The AI SDK's provider for OpenAI with chat completions.

import { createOpenAI } from "@ai-sdk/openai";
import { runModel } from "./ai_sdk.mjs";
import { BASE, KEY, MODEL } from "./checks.mjs";

await runModel(createOpenAI({ baseURL: BASE, apiKey: KEY }).chat(MODEL));
