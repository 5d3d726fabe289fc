// Prepares the fields of a raw row by their kinds, as docs/model-updates.md describes it.

const NUMBER = /^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$/;
const PADDED = /^[+-]?0\d/;
const TIME =
  /^(\d{4})-(\d\d)-(\d\d)(?:[T ](\d\d):(\d\d)(?::(\d\d)(?:[.,](\d{1,9}))?)?(Z|[+-](?:[01]\d|2[0-3]):?[0-5]\d)?)?$/;
const BLANKS = new Set(["", "?", "na", "n/a", "nan", "none", "null", "inf", "-inf"]);
const WORD = /[\p{L}\p{N}_]+/gu;
const WORDS_MAX = 200;
const LAST = /^last ([1-9]\d{0,2})$/;
const HUGE = 1e100; // Larger numbers count as missing.
const SECONDS_MAX = 1e11; // Larger numbers are milliseconds.
const DAY_MS = 86_400_000;
const YEARS_MS = [-62_135_596_800_000, 253_402_300_800_000]; // The years 1 to 9999.

// Returns a function from a row to its fields: [name, value] with numbers, texts, lists of texts, and null.
export function preparation({ kinds = {}, time_zone: zone = null, text_fields: texts }) {
  const clock = zone === null ? null : wallClock(zone); // Throws for a zone that is not known here.
  const time = (field, value, isText) => timeOrText(field, value, isText, clock);
  const readers = { words, category, number: numberOrText, time };
  for (const [field, kind] of Object.entries(kinds)) {
    const last = LAST.exec(kind);
    if (last) readers[kind] = (name, value) => category(name, Array.isArray(value) ? value.slice(-Number(last[1])) : value);
    if (Object.hasOwn(readers, kind)) continue;
    throw new Error(`the field ${field} has the kind ${kind}, which only a newer consumer can prepare`);
  }
  const undecided = new Set(texts);
  return (row) =>
    Object.entries(row).flatMap(([field, value]) => {
      if (!Object.hasOwn(kinds, field)) return [[field, value]];
      const isMissing = value === null || (isNumber(value) && !(Math.abs(Number(value)) <= HUGE));
      return isMissing ? [[field, null]] : readers[kinds[field]](field, value, undecided.has(field));
    });
}

const isTexts = (value) => Array.isArray(value) && value.every((each) => typeof each === "string");
const isNumber = (value) => ["number", "boolean", "bigint"].includes(typeof value);

function refused(field, expected) {
  return new Error(`expected ${expected} in the field ${field}`);
}

function words(field, value) {
  if (typeof value === "string") {
    value = [...new Set(value.toLowerCase().match(WORD) ?? [])].slice(0, WORDS_MAX);
  }
  if (!isTexts(value)) throw refused(field, "a text");
  return [[field, value]];
}

function category(field, value) {
  if (isNumber(value)) value = typeof value === "bigint" ? String(value) : textOf(Number(value));
  if (typeof value === "string") value = value.replace(/\0+$/, "");
  else if (!isTexts(value)) throw refused(field, "a text");
  return [[field, value]];
}

// The text of a number as Python writes it: 7, 0.5, 1.5e-05.
export function textOf(number) {
  if (Number.isInteger(number)) return BigInt(number).toString();
  if (Math.abs(number) >= 1e-4) return String(number);
  const [digits, exponent] = number.toExponential().split("e-");
  return `${digits}e-${exponent.padStart(2, "0")}`;
}

// Returns the number, the wall clock in milliseconds, or whether the text is blank; nothing for another text.
function read(text, clock) {
  const stripped = text.replace(/^[ \t\r\n]+|[ \t\r\n]+$/g, "");
  if (NUMBER.test(stripped)) return { number: Number(stripped), isPadded: PADDED.test(stripped) };
  const match = TIME.exec(stripped);
  if (match) return timeOf(match, clock);
  return { isBlank: BLANKS.has(stripped.toLowerCase()) };
}

function numberOrText(field, value, isText) {
  if (isNumber(value)) return [[field, Number(value)]];
  if (typeof value === "string") {
    const { number, isPadded, isBlank } = read(value, null);
    if (number !== undefined && !(isPadded && isText)) return [[field, number]];
    if (!isText && isBlank) return [[field, null]];
  } else if (!isTexts(value)) throw refused(field, "a number");
  if (isText || (Array.isArray(value) && value.length === 0)) return [[field, value]];
  throw refused(field, "a number");
}

function timeOrText(field, value, isText, clock) {
  let found = {};
  if (typeof value === "string") found = read(value, clock);
  else if (isNumber(value) && !isText) found = { number: Number(value) };
  else if (!isTexts(value)) throw refused(field, "a time");
  if (found.wall !== undefined) return partsOf(field, found);
  if (found.number !== undefined && !isText) {
    const ms = Math.floor(Math.abs(found.number) > SECONDS_MAX ? found.number : found.number * 1000);
    const wall = onWall(ms, clock);
    return wall === null ? [[field, null]] : partsOf(field, { wall, hasHour: true });
  }
  if (isText || (Array.isArray(value) && value.length === 0)) return [[field, value]];
  if (found.isBlank) return [[field, null]];
  throw refused(field, "a time");
}

function timeOf([, year, month, day, hour, minute, second = "0", fraction = "", offset], clock) {
  const at = new Date(0);
  at.setUTCFullYear(Number(year), Number(month) - 1, Number(day));
  const isDate = at.getUTCFullYear() === Number(year) && at.getUTCMonth() === Number(month) - 1 && Number(year) > 0;
  if (!isDate || Number(hour ?? 0) > 23 || Number(minute ?? 0) > 59 || Number(second) > 59) return {};
  if (hour === undefined) return { wall: at.getTime(), hasHour: false };
  const ms = Number(fraction.slice(0, 3).padEnd(3, "0"));
  const wall = at.getTime() + ((Number(hour) * 60 + Number(minute)) * 60 + Number(second)) * 1000 + ms;
  if (offset === undefined || !clock) return { wall, hasHour: true };
  const sign = offset.startsWith("-") ? -1 : 1;
  const ahead = offset === "Z" ? 0 : sign * (Number(offset.slice(1, 3)) * 60 + Number(offset.slice(-2)));
  return { wall: onWall(wall - ahead * 60_000, clock) ?? undefined, hasHour: true };
}

// Returns the time on the wall for milliseconds since 1970 UTC; null outside of the years 1 to 9999.
function onWall(ms, clock) {
  const isThere = (each) => each >= YEARS_MS[0] && each < YEARS_MS[1];
  const wall = clock && isThere(ms) ? clock(ms) : ms;
  return isThere(ms) && isThere(wall) ? wall : null;
}

// Returns the function from milliseconds since 1970 UTC to those that a clock on the wall of the zone shows.
function wallClock(timeZone) {
  const numeric = Object.fromEntries(["year", "month", "day", "hour", "minute", "second"].map((part) => [part, "numeric"]));
  const format = new Intl.DateTimeFormat("en-US", { timeZone, hourCycle: "h23", ...numeric });
  return (ms) => {
    const parts = Object.fromEntries(format.formatToParts(ms).map(({ type, value }) => [type, Number(value)]));
    const at = new Date(0);
    at.setUTCFullYear(parts.year, parts.month - 1, parts.day);
    at.setUTCHours(parts.hour, parts.minute, parts.second);
    return at.getTime() + (ms - Math.floor(ms / 1000) * 1000);
  };
}

function partsOf(field, { wall, hasHour }) {
  const days = Math.floor(wall / DAY_MS);
  const parts = hasHour ? [[`${field}[hour]`, String(Math.floor((wall - days * DAY_MS) / 3_600_000))]] : [];
  const weekday = ((((days + 3) % 7) + 7) % 7) + 1; // 1970-01-01 was a Thursday.
  parts.push([`${field}[weekday]`, String(weekday)], [`${field}[month]`, String(new Date(wall).getUTCMonth() + 1)]);
  return [...parts, [`${field}[trend]`, wall / DAY_MS]];
}
