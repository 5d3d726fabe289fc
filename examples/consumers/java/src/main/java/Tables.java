import com.fasterxml.jackson.databind.JsonNode;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.Map;
import java.util.SortedSet;

/** Adds up the tables of a published model, as docs/model-updates.md describes them. */
final class Tables {
  private static final int OF_COLUMN = 61;
  private static final int OF_PAIR = 256;

  private record Member(
      double[][] tables, double[][] slopes, double[] intercept, int[][] pairs, int[][] treeColumns, int[][] treeBins) {}

  private final List<String> fields = new ArrayList<>(); // Of each column; null for a category.
  private final double[][] edges;
  private final int[] categories;
  private final List<Member> members = new ArrayList<>();

  /** Throws IllegalArgumentException for a kind of column that only a newer consumer knows. */
  Tables(JsonNode shapes) {
    for (int column = 0; column < shapes.get("fields").size(); column++) {
      String kind = shapes.get("kinds").get(column).asText();
      if (!kind.equals("number") && !kind.equals("category")) {
        throw new IllegalArgumentException("a column of the kind " + kind + ", which only a newer consumer knows");
      }
      fields.add(kind.equals("number") ? shapes.get("fields").get(column).asText() : null);
    }
    edges = LinearModel.matrix(shapes.get("edges"));
    categories = whole(shapes.get("categories"));
    for (JsonNode member : shapes.get("members")) {
      members.add(
          new Member(
              LinearModel.matrix(member.get("tables")), LinearModel.matrix(member.get("slopes")), LinearModel.numbers(member.get("intercept")),
              rows(member.get("pairs")), rows(member.get("tree_columns")), rows(member.get("tree_bins"))));
    }
  }

  /**
   * Returns the scores of each member for a row: its numbers by field, the distances of the linear model's fields from
   * their centers, and the positions of its texts among the linear model's places.
   */
  List<double[]> scores(Map<String, Double> numbers, double[] distances, SortedSet<Integer> places) {
    int[] fine = new int[fields.size()];
    for (int column = 0; column < fine.length; column++) {
      Double number = fields.get(column) == null ? null : numbers.get(fields.get(column));
      if (number == null) continue;
      fine[column] = 1;
      for (double edge : edges[column]) fine[column] += edge < number ? 1 : 0;
    }
    for (int place : places) {
      if (categories[place] > 0) fine[categories[place] / OF_COLUMN] = categories[place] % OF_COLUMN;
    }
    return members.stream().map(member -> scores(member, fine, distances)).toList();
  }

  private static double[] scores(Member member, int[] fine, double[] distances) {
    double[] sums = new double[member.intercept.length];
    int start = 0;
    for (int bin : fine) {
      add(member.tables[start + bin], 1.0, sums);
      start += OF_COLUMN;
    }
    for (int[] pair : member.pairs) {
      add(member.tables[start + 16 * ((fine[pair[0]] + 3) / 4) + (fine[pair[1]] + 3) / 4], 1.0, sums);
      start += OF_PAIR;
    }
    for (int tree = 0; tree < member.treeColumns.length; tree++) {
      int cell = 0;
      int depth = member.treeColumns[tree].length;
      for (int bit = 0; bit < depth; bit++) {
        cell = 2 * cell + (fine[member.treeColumns[tree][bit]] > member.treeBins[tree][bit] ? 1 : 0);
      }
      add(member.tables[start + cell], 1.0, sums);
      start += 1 << depth;
    }
    for (int field = 0; field < distances.length; field++) add(member.slopes[field], distances[field], sums);
    add(member.intercept, 1.0, sums);
    return sums;
  }

  private static void add(double[] numbers, double factor, double[] sums) {
    for (int score = 0; score < sums.length; score++) sums[score] += factor * numbers[score];
  }

  private static int[][] rows(JsonNode rows) {
    int[][] found = new int[rows.size()][];
    for (int row = 0; row < found.length; row++) found[row] = whole(rows.get(row));
    return found;
  }

  private static int[] whole(JsonNode values) {
    return Arrays.stream(LinearModel.numbers(values)).mapToInt(each -> (int) each).toArray();
  }
}
