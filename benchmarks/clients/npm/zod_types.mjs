// Every type and check of Zod 4 as an argument of a tool, without `strict`, by the AI SDK and by `z.toJSONSchema`.

import { createOpenAI } from "@ai-sdk/openai";
import { generateText, tool } from "ai";
import * as z from "zod";
import { BASE, KEY, MODEL, QUESTION, check, run } from "./checks.mjs";

const Tree = z.object({
  name: z.string(),
  get children() {
    return z.array(Tree);
  },
});
const types = {
  string: z.string(),
  bounded: z.string().min(1).max(9),
  length: z.string().length(3),
  regex: z.string().regex(/^a.*/),
  lookAhead: z.string().regex(/^(?!x)a/),
  startsWith: z.string().startsWith("a").endsWith("b").includes("c"),
  lower: z.string().lowercase(),
  upper: z.string().uppercase(),
  email: z.email(),
  uuid: z.uuid(),
  guid: z.guid(),
  url: z.url(),
  httpUrl: z.httpUrl(),
  hostname: z.hostname(),
  emoji: z.emoji(),
  base64: z.base64(),
  base64url: z.base64url(),
  hex: z.hex(),
  hash: z.hash("sha256"),
  jwt: z.jwt(),
  nanoid: z.nanoid(),
  cuid: z.cuid(),
  cuid2: z.cuid2(),
  ulid: z.ulid(),
  ipv4: z.ipv4(),
  ipv6: z.ipv6(),
  cidrv4: z.cidrv4(),
  cidrv6: z.cidrv6(),
  e164: z.e164(),
  isoDate: z.iso.date(),
  isoTime: z.iso.time(),
  isoDatetime: z.iso.datetime({ offset: true }),
  isoDuration: z.iso.duration(),
  number: z.number(),
  positive: z.number().positive().max(5),
  negative: z.number().negative(),
  multiple: z.number().multipleOf(0.01),
  int: z.int(),
  int32: z.int32(),
  uint32: z.uint32(),
  float32: z.float32(),
  float64: z.float64(),
  boolean: z.boolean(),
  stringbool: z.stringbool(),
  nil: z.null(),
  any: z.any(),
  unknown: z.unknown(),
  never: z.never().optional(),
  literal: z.literal("a"),
  literals: z.literal(["a", 1, null]),
  enumeration: z.enum(["a", "b"]),
  nativeEnum: z.enum({ Red: 0, Blue: 1 }),
  template: z.templateLiteral(["v", z.int()]),
  array: z.array(z.string()),
  boundedArray: z.array(z.string()).min(1).max(3),
  tuple: z.tuple([z.string(), z.number()]),
  restTuple: z.tuple([z.string()], z.number()),
  object: z.object({ a: z.string(), b: z.number().optional() }),
  strictObject: z.strictObject({ a: z.string() }),
  looseObject: z.looseObject({ a: z.string() }),
  catchall: z.object({ a: z.string() }).catchall(z.number()),
  partial: z.object({ a: z.string() }).partial(),
  record: z.record(z.string(), z.number()),
  enumRecord: z.record(z.enum(["a", "b"]), z.number()),
  partialRecord: z.partialRecord(z.enum(["a", "b"]), z.number()),
  union: z.union([z.string(), z.number()]),
  discriminated: z.discriminatedUnion("k", [
    z.object({ k: z.literal("a"), a: z.string() }),
    z.object({ k: z.literal("b"), b: z.number() }),
  ]),
  intersection: z.intersection(z.object({ a: z.string() }), z.object({ b: z.number() })),
  and: z.object({ a: z.string() }).and(z.object({ b: z.number() })),
  optional: z.string().optional(),
  nullable: z.string().nullable(),
  nullish: z.string().nullish(),
  defaulted: z.string().default("a"),
  prefaulted: z.string().prefault("a"),
  caught: z.string().catch("a"),
  readonly: z.string().readonly(),
  branded: z.string().brand("Name"),
  described: z.string().describe("a name").meta({ title: "Name", examples: ["x"] }),
  refined: z.string().refine((text) => text.length > 1),
  piped: z.string().pipe(z.string().min(2)),
  trimmed: z.string().trim().toLowerCase(),
  lazy: z.lazy(() => z.string()),
  json: z.json(),
  tree: Tree,
  file: z.file().min(3).mime("image/png"),
};
const drafts = ["draft-2020-12", "draft-07", "draft-04", "openapi-3.0"];
// Types of a request. The descriptions of all types do not fit into the context of the model.
const perRequest = 20;

function* groups() {
  const entries = Object.entries(types);
  for (let start = 0; start < entries.length; start += perRequest) yield entries.slice(start, start + perRequest);
}

// Zod refuses types that JSON Schema cannot express, such as `z.bigint`. They are not in the list.
async function schemasOfZod() {
  const refused = [];
  for (const target of drafts) {
    const options = { target, io: "input", unrepresentable: "any" };
    for (const group of groups()) {
      const tools = group.map(([name, type]) => {
        const parameters = z.toJSONSchema(z.object({ value: type }), options);
        return { type: "function", function: { name, parameters } };
      });
      await answered(tools).catch((error) => refused.push(error.message));
    }
  }
  check(refused.length === 0, `${refused.length} are refused: ${refused}`);
}

async function toolsOfTheAiSdk() {
  const provider = createOpenAI({ baseURL: BASE, apiKey: KEY });
  for (const model of [provider(MODEL), provider.chat(MODEL)]) {
    for (const group of groups()) {
      const entries = group.map(([name, type]) => [name, tool({ inputSchema: z.object({ value: type }) })]);
      const tools = Object.fromEntries(entries);
      await generateText({ model, prompt: QUESTION, tools, maxOutputTokens: 16, maxRetries: 0 });
    }
  }
}

async function answered(tools) {
  const messages = [{ role: "user", content: QUESTION }];
  const response = await fetch(`${BASE}/chat/completions`, {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify({ model: MODEL, messages, tools, max_tokens: 1, tool_choice: "required" }),
  });
  if (!response.ok) throw new Error(await response.text());
}

await run("zod", [schemasOfZod, toolsOfTheAiSdk]);
