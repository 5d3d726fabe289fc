import com.fasterxml.jackson.databind.JsonNode;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;

/** Adds up the tables of a published model, as docs/model-updates.md describes them. */
final class Tables {
  private static final int OF_COLUMN = 61;
  private static final int OF_PAIR = 256;

  /** The values of a row as tables see them: fine bins, and the distances of numbers from their centers. */
  private record Bins(int[] fine, double[] distance) {
    int coarse(int column) {
      return (fine[column] + 3) / 4;
    }
  }

  private record Column(
      String field, boolean isText, boolean isKnown, double[] edges, double period, double center, double limit,
      Map<Long, Integer> bins, int other) {}

  private record Member(
      double[][] tables, double[][] slopes, double[] intercept, int[][] pairs, int[][] treeColumns, int[][] treeBins) {}

  private final List<Column> columns = new ArrayList<>();
  private final List<Member> members = new ArrayList<>();
  private final int bits;

  /** Throws IllegalArgumentException for a kind of column that only a newer consumer knows. */
  Tables(JsonNode shapes, Set<String> fields, Set<String> texts, int bits) {
    this.bits = bits;
    for (int column = 0; column < shapes.get("fields").size(); column++) {
      String field = shapes.get("fields").get(column).asText();
      String kind = shapes.get("kinds").get(column).asText();
      if (!Set.of("number", "period", "category").contains(kind)) {
        throw new IllegalArgumentException("a column of the kind " + kind + ", which only a newer consumer knows");
      }
      boolean isText = kind.equals("category");
      Map<Long, Integer> bins = new HashMap<>();
      for (JsonNode row : shapes.get("categories")) {
        if (row.get(0).asInt() == column) bins.put(row.get(1).asLong(), row.get(2).asInt());
      }
      columns.add(
          new Column(
              field, isText, (isText ? texts : fields).contains(field),
              LinearModel.numbers(shapes.get("edges").get(column)), shapes.get("period").get(column).asDouble(), shapes.get("center").get(column).asDouble(),
              shapes.get("limit").get(column).asDouble(), bins, shapes.get("other").get(column).asInt()));
    }
    for (JsonNode member : shapes.get("members")) {
      members.add(
          new Member(
              matrix(member.get("tables")), matrix(member.get("slopes")), LinearModel.numbers(member.get("intercept")),
              whole(member.get("pairs")), whole(member.get("tree_columns")), whole(member.get("tree_bins"))));
    }
  }

  /** Returns the scores of each member for the values of a row by field: numbers, truth values, texts and nulls. */
  List<double[]> scores(Map<String, JsonNode> values) {
    Bins bins = new Bins(new int[columns.size()], new double[columns.size()]);
    for (int at = 0; at < columns.size(); at++) {
      Column column = columns.get(at);
      JsonNode value = values.get(column.field);
      if (value == null || !column.isKnown) continue;
      if (column.isText) bins.fine[at] = binOfText(column, value);
      else placeNumber(column, value, bins, at);
    }
    return members.stream().map(member -> scores(member, bins)).toList();
  }

  private int binOfText(Column column, JsonNode text) {
    if (!text.isTextual()) return 0;
    long place = LinearModel.placeOf(column.field, LinearModel.TEXT_FOLLOWS, text.asText(), bits);
    return column.bins.getOrDefault(place, column.other);
  }

  private static void placeNumber(Column column, JsonNode value, Bins bins, int at) {
    if (!value.isNumber() && !value.isBoolean()) return;
    double number = value.isBoolean() ? (value.asBoolean() ? 1.0 : 0.0) : value.asDouble();
    if (!(Math.abs(number) <= LinearModel.HUGE)) return;
    if (column.period > 0.0) number -= column.period * Math.floor(number / column.period);
    int below = 0;
    while (below < column.edges.length && column.edges[below] < number) below++;
    bins.fine[at] = 1 + below;
    bins.distance[at] = LinearModel.clip(number - column.center, -column.limit, column.limit);
  }

  private double[] scores(Member member, Bins bins) {
    double[] sums = new double[member.intercept.length];
    int start = 0;
    for (int column = 0; column < columns.size(); column++, start += OF_COLUMN) {
      add(member.tables[start + bins.fine[column]], 1.0, sums);
    }
    for (int[] pair : member.pairs) {
      add(member.tables[start + 16 * bins.coarse(pair[0]) + bins.coarse(pair[1])], 1.0, sums);
      start += OF_PAIR;
    }
    for (int tree = 0; tree < member.treeColumns.length; tree++) {
      int cell = 0;
      int depth = member.treeColumns[tree].length;
      for (int bit = 0; bit < depth; bit++) {
        cell = 2 * cell + (bins.fine[member.treeColumns[tree][bit]] > member.treeBins[tree][bit] ? 1 : 0);
      }
      add(member.tables[start + cell], 1.0, sums);
      start += 1 << depth;
    }
    for (int column = 0; column < columns.size(); column++) add(member.slopes[column], bins.distance[column], sums);
    add(member.intercept, 1.0, sums);
    return sums;
  }

  private static void add(double[] numbers, double factor, double[] sums) {
    for (int score = 0; score < sums.length; score++) sums[score] += factor * numbers[score];
  }

  private static double[][] matrix(JsonNode rows) {
    double[][] matrix = new double[rows.size()][];
    for (int row = 0; row < matrix.length; row++) matrix[row] = LinearModel.numbers(rows.get(row));
    return matrix;
  }

  private static int[][] whole(JsonNode rows) {
    int[][] matrix = new int[rows.size()][];
    for (int row = 0; row < matrix.length; row++) {
      matrix[row] = Arrays.stream(LinearModel.numbers(rows.get(row))).mapToInt(each -> (int) each).toArray();
    }
    return matrix;
  }
}
