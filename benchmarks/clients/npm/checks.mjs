// Runs the tasks of one client in this process, and prints a line of JSON for the client and for each task.

import { readFileSync } from "node:fs";

const url = process.env.LONGSPAN_URL ?? "http://127.0.0.1:8000";
export const URL_OF_SERVER = url;
export const BASE = `${url}/v1`;
export const KEY = "none";
export const MODEL = "smollm2-135m";
export const QUESTION = "Does it rain in Rome?";
export const CITY = {
  type: "object",
  properties: { city: { type: "string", enum: ["Rome", "Oslo"] } },
  required: ["city"],
  additionalProperties: false,
};
export const FORECAST = "It rains all day.";
export const MAX_TOKENS = 24;

export function check(condition, message) {
  if (!condition) throw new Error(message);
}

export function checkCity(value) {
  const { city } = typeof value === "string" ? JSON.parse(value) : value;
  check(["Rome", "Oslo"].includes(city), `the city is ${city}`);
}

// Names of functions in camel case are the names of tasks. A task fails by an exception.
export async function run(packageName, tasks) {
  const text = readFileSync(new URL(`node_modules/${packageName}/package.json`, import.meta.url));
  console.log(JSON.stringify({ version: JSON.parse(text).version }));
  for (const task of tasks) {
    let error = null;
    try {
      await task();
    } catch (caught) {
      console.error(caught);
      error = `${caught.name}: ${caught.message}`;
    }
    const name = task.name.replace(/[A-Z]/g, (letter) => ` ${letter.toLowerCase()}`);
    console.log(JSON.stringify({ task: name, error }));
  }
}
