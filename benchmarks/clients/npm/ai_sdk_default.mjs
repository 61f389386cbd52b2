// The default language model of the AI SDK's provider for OpenAI, which uses the Responses API.

import { createOpenAI } from "@ai-sdk/openai";
import { runModel } from "./ai_sdk.mjs";
import { BASE, KEY, MODEL } from "./checks.mjs";

await runModel(createOpenAI({ baseURL: BASE, apiKey: KEY })(MODEL));
