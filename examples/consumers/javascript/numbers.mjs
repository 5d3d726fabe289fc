// Reads JSON with whole numbers of any size.

import { randomUUID } from "node:crypto";

const MARK = randomUUID();

// JSON.parse would round whole numbers above 2**53, which may be ids, or keys of features: they become BigInts.
export function parsed(text) {
  JSON.parse(text); // Throws for what is no JSON.
  const marked = text.replace(/"(?:[^"\\]|\\.)*"|-?\d[\d.eE+-]*/g, (token) =>
    /^-?\d{16,}$/.test(token) ? JSON.stringify(MARK + token) : token,
  );
  const isMarked = (value) => typeof value === "string" && value.startsWith(MARK);
  return JSON.parse(marked, (_, value) => (isMarked(value) ? BigInt(value.slice(MARK.length)) : value));
}
