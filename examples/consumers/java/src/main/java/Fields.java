import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.node.ArrayNode;
import com.fasterxml.jackson.databind.node.JsonNodeFactory;
import java.math.BigDecimal;
import java.math.MathContext;
import java.time.DateTimeException;
import java.time.Instant;
import java.time.LocalDate;
import java.time.LocalDateTime;
import java.time.ZoneId;
import java.time.ZoneOffset;
import java.util.HashMap;
import java.util.HashSet;
import java.util.LinkedHashMap;
import java.util.LinkedHashSet;
import java.util.Locale;
import java.util.Map;
import java.util.Set;
import java.util.regex.Matcher;
import java.util.regex.Pattern;

/** Prepares the fields of a raw row by their kinds, as docs/model-updates.md describes it. */
final class Fields {
  private static final Pattern NUMBER = Pattern.compile("[+-]?([0-9]+\\.?[0-9]*|\\.[0-9]+)([eE][+-]?[0-9]+)?");
  private static final Pattern PADDED = Pattern.compile("[+-]?0[0-9].*", Pattern.DOTALL);
  private static final Pattern TIME =
      Pattern.compile(
          "(\\d{4})-(\\d\\d)-(\\d\\d)(?:[T ](\\d\\d):(\\d\\d)(?::(\\d\\d)(?:[.,](\\d{1,9}))?)?"
              + "(Z|[+-](?:[01]\\d|2[0-3]):?[0-5]\\d)?)?");
  private static final Pattern AROUND = Pattern.compile("^[ \\t\\r\\n]+|[ \\t\\r\\n]+\\z");
  private static final Pattern WORD = Pattern.compile("[\\p{L}\\p{N}_]+");
  private static final Set<String> BLANKS = Set.of("", "?", "na", "n/a", "nan", "none", "null", "inf", "-inf");
  private static final int WORDS_MAX = 200;
  private static final Pattern LAST = Pattern.compile("last [1-9][0-9]{0,2}");
  private static final double HUGE = 1e100; // Larger numbers count as missing.
  private static final double SECONDS_MAX = 1e11; // Larger numbers are milliseconds.
  private static final double DAY_MS = 86_400_000.0;
  private static final double FIRST_MS = -62_135_596_800_000.0; // The years 1 to 9999.
  private static final double BEHIND_LAST_MS = 253_402_300_800_000.0;
  private static final JsonNodeFactory NODES = JsonNodeFactory.instance;

  /** A text as a number, a time, or a blank one; all are null or false for another text. */
  private record Found(Double number, boolean isPadded, Double wallMs, boolean hasHour, boolean isBlank) {}

  private final Map<String, String> kinds = new HashMap<>();
  private final Set<String> texts = new HashSet<>();
  private final ZoneId zone;

  Fields(JsonNode parameters) {
    for (var entry : parameters.path("kinds").properties()) {
      String kind = entry.getValue().asText();
      if (!Set.of("number", "category", "words", "time").contains(kind) && !LAST.matcher(kind).matches()) {
        throw new IllegalArgumentException(
            "the field " + entry.getKey() + " has the kind " + kind + ", which only a newer consumer can prepare");
      }
      kinds.put(entry.getKey(), kind);
    }
    for (JsonNode field : parameters.path("text_fields")) texts.add(field.asText());
    try {
      zone = parameters.hasNonNull("time_zone") ? ZoneId.of(parameters.get("time_zone").asText()) : null;
    } catch (DateTimeException error) {
      throw new IllegalArgumentException("a time zone that is not known here: " + error.getMessage());
    }
  }

  /** Returns the fields of a row: numbers, texts, lists of texts, and null; lists of fields without a kind as given. */
  Map<String, JsonNode> of(JsonNode row) {
    Map<String, JsonNode> prepared = new LinkedHashMap<>();
    for (var entry : row.properties()) {
      String field = entry.getKey();
      JsonNode value = entry.getValue();
      String kind = kinds.get(field);
      if (kind == null) {
        prepared.put(field, value);
      } else if (value.isNull() || (value.isNumber() && !(Math.abs(value.asDouble()) <= HUGE))) {
        prepared.put(field, NODES.nullNode());
      } else if (LAST.matcher(kind).matches()) {
        prepared.put(field, category(field, end(value, kind)));
      } else {
        switch (kind) {
          case "words" -> prepared.put(field, words(field, value));
          case "category" -> prepared.put(field, category(field, value));
          case "number" -> prepared.put(field, number(field, value, texts.contains(field)));
          default -> putTime(field, value, texts.contains(field), prepared);
        }
      }
    }
    return prepared;
  }

  private static JsonNode words(String field, JsonNode value) {
    if (!value.isTextual()) return texts(field, value, "a text");
    Set<String> different = new LinkedHashSet<>();
    Matcher words = WORD.matcher(value.asText().toLowerCase(Locale.ROOT));
    while (words.find() && different.size() < WORDS_MAX) different.add(words.group());
    ArrayNode list = NODES.arrayNode();
    different.forEach(list::add);
    return list;
  }

  /** Returns the last texts of a list, so many as the kind says, and other values as they are. */
  private static JsonNode end(JsonNode value, String kind) {
    if (!value.isArray()) return value;
    ArrayNode list = NODES.arrayNode();
    for (int at = Math.max(0, value.size() - Integer.parseInt(kind.substring(5))); at < value.size(); at++) {
      list.add(value.get(at));
    }
    return list;
  }

  private static JsonNode category(String field, JsonNode value) {
    if (value.isBoolean()) return NODES.textNode(value.asBoolean() ? "1" : "0");
    if (value.isIntegralNumber()) return NODES.textNode(value.bigIntegerValue().toString());
    if (value.isNumber()) return NODES.textNode(textOf(value.asDouble()));
    if (value.isTextual()) return NODES.textNode(value.asText().replaceAll("\0+\\z", ""));
    return texts(field, value, "a text");
  }

  /** Returns the text of a number as Python writes it: 7, 0.5, 1.5e-05. */
  static String textOf(double number) {
    BigDecimal exact = new BigDecimal(number);
    if (number == Math.rint(number)) return exact.toBigInteger().toString();
    BigDecimal shortest = exact;
    for (int digits = 17; digits > 0; digits--) {
      BigDecimal rounded = exact.round(new MathContext(digits));
      if (rounded.doubleValue() != number) break;
      shortest = rounded;
    }
    shortest = shortest.stripTrailingZeros();
    if (Math.abs(number) >= 1e-4) return shortest.toPlainString();
    String digits = shortest.unscaledValue().abs().toString();
    int exponent = shortest.scale() - digits.length() + 1;
    String fraction = digits.length() > 1 ? "." + digits.substring(1) : "";
    return (number < 0 ? "-" : "") + digits.charAt(0) + fraction + "e-" + (exponent < 10 ? "0" : "") + exponent;
  }

  private static JsonNode number(String field, JsonNode value, boolean isText) {
    if (value.isNumber() || value.isBoolean()) return value;
    if (!value.isTextual()) {
      JsonNode list = texts(field, value, "a number");
      if (isText || list.isEmpty()) return list;
    } else {
      Found found = read(value.asText(), null);
      if (found.number != null && !(found.isPadded && isText)) return NODES.numberNode(found.number);
      if (isText) return value;
      if (found.isBlank) return NODES.nullNode();
    }
    throw refused(field, "a number");
  }

  private void putTime(String field, JsonNode value, boolean isText, Map<String, JsonNode> prepared) {
    Found found = new Found(null, false, null, false, false);
    if (value.isTextual()) {
      found = read(value.asText(), zone);
    } else if ((value.isNumber() || value.isBoolean()) && !isText) {
      double number = value.isBoolean() ? (value.asBoolean() ? 1.0 : 0.0) : value.asDouble();
      found = new Found(number, false, null, false, false);
    } else if (value.isNumber() || value.isBoolean()) {
      throw refused(field, "a text");
    }
    if (found.wallMs != null) {
      putParts(field, found.wallMs, found.hasHour, prepared);
    } else if (found.number != null && !isText) {
      double ms = Math.floor(Math.abs(found.number) > SECONDS_MAX ? found.number : found.number * 1000.0);
      Double wallMs = onWall(ms, zone);
      if (wallMs != null) putParts(field, wallMs, true, prepared);
      else prepared.put(field, NODES.nullNode());
    } else if (value.isTextual() && !isText) {
      if (!found.isBlank) throw refused(field, "a time");
      prepared.put(field, NODES.nullNode());
    } else {
      JsonNode given = value.isTextual() ? value : texts(field, value, "a time");
      if (!isText && !given.isEmpty()) throw refused(field, "a time");
      prepared.put(field, given);
    }
  }

  private static Found read(String text, ZoneId zone) {
    String stripped = AROUND.matcher(text).replaceAll("");
    if (NUMBER.matcher(stripped).matches()) {
      return new Found(Double.parseDouble(stripped), PADDED.matcher(stripped).matches(), null, false, false);
    }
    Matcher time = TIME.matcher(stripped);
    try {
      if (time.matches()) return new Found(null, false, wallMs(time, zone), time.group(4) != null, false);
    } catch (DateTimeException error) { // There is no such day, or no such time.
      return new Found(null, false, null, false, false);
    }
    return new Found(null, false, null, false, BLANKS.contains(stripped.toLowerCase(Locale.ROOT)));
  }

  private static Double wallMs(Matcher time, ZoneId zone) {
    if (time.group(1).equals("0000")) throw new DateTimeException("the year 0");
    LocalDate day = LocalDate.of(number(time, 1), number(time, 2), number(time, 3));
    if (time.group(4) == null) return day.toEpochDay() * DAY_MS;
    String fraction = time.group(7) == null ? "" : time.group(7);
    int ms = Integer.parseInt((fraction + "000").substring(0, 3));
    int second = time.group(6) == null ? 0 : number(time, 6);
    LocalDateTime at = day.atTime(number(time, 4), number(time, 5), second, ms * 1_000_000);
    String offset = time.group(8);
    if (offset == null || zone == null) return (double) at.toInstant(ZoneOffset.UTC).toEpochMilli();
    int minutes = 0;
    if (!offset.equals("Z")) {
      minutes = Integer.parseInt(offset.substring(1, 3)) * 60 + Integer.parseInt(offset.substring(offset.length() - 2));
    }
    long ahead = 60_000L * (offset.startsWith("-") ? -minutes : minutes);
    return onWall((double) (at.toInstant(ZoneOffset.UTC).toEpochMilli() - ahead), zone);
  }

  private static int number(Matcher time, int group) {
    return Integer.parseInt(time.group(group));
  }

  /** Returns the time on the wall; null outside of the years 1 to 9999. */
  private static Double onWall(double ms, ZoneId zone) {
    if (!(ms >= FIRST_MS && ms < BEHIND_LAST_MS)) return null;
    if (zone == null) return ms;
    double wall = ms + 1000.0 * zone.getRules().getOffset(Instant.ofEpochMilli((long) ms)).getTotalSeconds();
    return wall >= FIRST_MS && wall < BEHIND_LAST_MS ? wall : null;
  }

  private static void putParts(String field, double wallMs, boolean hasHour, Map<String, JsonNode> prepared) {
    long days = (long) Math.floor(wallMs / DAY_MS);
    LocalDate day = LocalDate.ofEpochDay(days);
    int hour = (int) ((wallMs - days * DAY_MS) / 3_600_000.0);
    if (hasHour) prepared.put(field + "[hour]", NODES.textNode(String.valueOf(hour)));
    prepared.put(field + "[weekday]", NODES.textNode(String.valueOf(day.getDayOfWeek().getValue())));
    prepared.put(field + "[month]", NODES.textNode(String.valueOf(day.getMonthValue())));
    prepared.put(field + "[trend]", NODES.numberNode(wallMs / DAY_MS));
  }

  private static JsonNode texts(String field, JsonNode value, String expected) {
    if (!value.isArray()) throw refused(field, expected);
    for (JsonNode each : value) if (!each.isTextual()) throw refused(field, expected);
    return value;
  }

  private static IllegalArgumentException refused(String field, String expected) {
    return new IllegalArgumentException("expected " + expected + " in the field " + field);
  }
}
