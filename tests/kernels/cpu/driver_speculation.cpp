// Do the kernels of drafts stay within exactly the memory they are given, and do they do what a
// plain loop does?
#include "driver_speculation.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <vector>

#include "speculation.h"

namespace {

using Wide = std::vector<int64_t>;
using Narrow = std::vector<int32_t>;

struct History {
  int64_t places, width;
  Narrow tokens;
  Wide lens, found;

  int32_t* row(int64_t place) { return tokens.data() + place * width; }
};

bool wrong(const char* what, int64_t row) {
  std::printf("draft_tokens: %s of row %d\n", what, int(row));
  return true;
}

// Longest match, then the most recent; as many drafts as the rule says.
Narrow looked_up(const int32_t* tokens, int64_t num, const LookUpArgs& rule) {
  int64_t best = 0, at = 0;
  for (int64_t end = 1; end < num; ++end) {
    int64_t match = 0;
    while (match < std::min(end, rule.max_match) &&
           tokens[end - 1 - match] == tokens[num - 1 - match])
      ++match;
    if (match > 0 && match >= best) best = match, at = end;
  }
  Narrow longer(tokens, tokens + num);
  if (best < rule.min_match) return {};
  int64_t found = std::min(rule.max_draft_tokens, rule.token_width - num);
  if (rule.drafts_per_match) found = std::min(found, rule.drafts_per_match * best);
  for (int64_t i = 0; i < found; ++i) longer.push_back(longer[size_t(at + i)]);
  return Narrow(longer.begin() + num, longer.end());
}

bool check_look_up(History& h, const Wide& places, std::mt19937& noise) {
  int64_t longest = 1 + int64_t(noise() % 9);
  LookUpArgs args{places.data(), h.tokens.data(), h.lens.data(), h.found.data(),
                  int64_t(places.size()), h.width, h.width, 1 + int64_t(noise()) % longest,
                  longest, 1 + int64_t(noise() % 6), int64_t(noise() % 3)};
  History want = h;
  for (int64_t place : places) {
    if (place == 0) continue;
    Narrow found = looked_up(want.row(place), want.lens[size_t(place)], args);
    std::copy(found.begin(), found.end(), want.row(place) + want.lens[size_t(place)]);
    want.found[size_t(place)] = int64_t(found.size());
  }
  bool failed = rl_look_up(&args) != 0;
  return failed || (want.tokens != h.tokens && wrong("what is looked up", -1)) ||
         (want.found != h.found && wrong("how much is looked up", -1));
}

bool check_inputs(History& h, const Wide& places, const Wide& limits, std::mt19937& noise) {
  int64_t rows = int64_t(places.size()), groups = 1 + int64_t(noise() % 3), size = 4;
  int64_t width = std::max<int64_t>(1, (h.width + size - 1) / size - int64_t(noise() % 2));
  int64_t num_new = 1 + int64_t(noise() % 5);
  int64_t first = int64_t(noise() % 4) - 1, tokens = rows * num_new, last = h.width - 1;
  Narrow tables(size_t(groups * h.places * width)), lens(size_t(rows), -1);
  for (int32_t& block : tables) block = int32_t(noise() % 100);
  Wide fresh(size_t(2 * groups * rows), -1);
  for (int64_t row = 0; row < rows; ++row) {
    if (places[size_t(row)] == 0 || noise() % 2) continue;
    int64_t at = 2 * int64_t(noise() % uint64_t(groups)) * rows + row;
    fresh[size_t(at)] = 100 + row, fresh[size_t(at + rows)] = int64_t(noise() % uint64_t(width));
  }
  Wide ids(size_t(tokens), -1), positions(ids), nexts(ids), slots(size_t(groups * tokens), -1);
  DraftInputsArgs args{places.data(), limits.data(), fresh.data(), h.tokens.data(), h.lens.data(),
                       tables.data(), ids.data(), positions.data(), nexts.data(), lens.data(),
                       slots.data(), rows, groups, rows, h.places * width, width, width, h.width,
                       h.width, tokens, size, num_new, first, last};
  if (rl_draft_inputs(&args) != 0) return wrong("refused", -1);
  for (int64_t t = 0; t < tokens; ++t) {
    int64_t row = t / num_new, place = places[size_t(row)], newest = h.lens[size_t(place)] - 1;
    int64_t position = std::max<int64_t>(0, newest + first + t % num_new);
    bool has_block = position <= newest + limits[size_t(row)] && position / size < width;
    if (ids[size_t(t)] != h.row(place)[std::min(position, h.width - 1)]) return wrong("token", row);
    if (positions[size_t(t)] != std::min(position, last - 1)) return wrong("position", row);
    if (nexts[size_t(t)] != position + 1) return wrong("next position", row);
    for (int64_t group = 0; group < groups; ++group) {
      int64_t at = has_block ? position / size : 0, block = 0;
      if (has_block) block = tables[size_t((group * h.places + place) * width + at)];
      if (slots[size_t(group * tokens + t)] != block * size + position % size)
        return wrong("slot", row);
    }
    if (t % num_new == num_new - 1 && lens[size_t(row)] != position + 1) return wrong("length", row);
  }
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t group = 0; group < groups; ++group) {
      int64_t block = fresh[size_t(2 * group * rows + row)];
      int64_t at = fresh[size_t((2 * group + 1) * rows + row)];
      int64_t entry = (group * h.places + places[size_t(row)]) * width + at;
      if (block >= 0 && tables[size_t(entry)] != block) return wrong("new block", row);
    }
  }
  return false;
}

bool check_accept(History& h, const Wide& places, const Wide& limits, std::mt19937& noise) {
  int64_t rows = int64_t(places.size()), num_new = 1 + int64_t(noise() % 5), room = num_new + 3;
  Wide ids(size_t(rows * num_new)), out(size_t(rows * room), -7);
  std::vector<uint8_t> is_sound(ids.size());
  for (int64_t& id : ids) id = int64_t(noise() % 2);
  for (uint8_t& sound : is_sound) sound = noise() % 10 != 0;
  AcceptArgs args{ids.data(), is_sound.data(), places.data(), limits.data(), h.tokens.data(),
                  h.lens.data(), h.found.data(), out.data(), rows, num_new, h.width, h.width,
                  room, room};
  History before = h;
  if (rl_accept(&args) != 0) return wrong("refused", -1);
  for (int64_t row = 0; row < rows; ++row) {
    int64_t place = places[size_t(row)], len = before.lens[size_t(place)], num = 1;
    int64_t found = before.found[size_t(place)];
    const int64_t* mine = ids.data() + row * num_new;
    auto is_right = [&](int64_t i) {
      return len + i < h.width && mine[i] == before.row(place)[len + i];
    };
    while (num <= std::min({limits[size_t(row)], found, num_new - 1}) && is_right(num - 1)) ++num;
    bool is_first = found > 0 && is_sound[size_t(row * num_new)] && is_right(0);
    for (int64_t i = 0, reached = num; i < reached; ++i)
      if (!is_sound[size_t(row * num_new + i)]) num = 0;
    const int64_t* told = out.data() + row * room;
    if (told[0] != num || told[1] != found || told[2] != is_first) return wrong("counts", row);
    for (int64_t i = 0; i < num_new; ++i)
      if (told[3 + i] != (i < num ? mine[i] : -1)) return wrong("ids", row);
    int64_t grown = place ? std::min(len + num, h.width) : len;
    if (h.lens[size_t(place)] != grown || h.found[size_t(place)] != 0) return wrong("length", row);
    for (int64_t i = 0; i < h.width; ++i) {
      bool is_new = place && i >= len && i < len + num;
      int64_t wanted = is_new ? mine[i - len] : before.row(place)[i];
      if (h.row(place)[i] != wanted) return wrong("history", row);
    }
  }
  return false;
}

}  // namespace

int check_speculation(std::mt19937& noise) {
  int64_t places = 1 + int64_t(noise() % 6), width = 2 + int64_t(noise() % 300);
  History h{places, width, Narrow(size_t(places * width)), Wide(size_t(places)), {}};
  h.found.assign(size_t(places), 0);
  for (int32_t& token : h.tokens) token = int32_t(noise() % 2);
  for (int64_t& len : h.lens) len = 1 + int64_t(noise() % uint64_t(width));
  h.lens[0] = 2;
  Wide rows, limits;
  for (int64_t place = 1; place < places; ++place)
    if (noise() % 3) rows.push_back(place);
  while (rows.size() < 1 + noise() % 3) rows.push_back(0);
  std::shuffle(rows.begin(), rows.end(), noise);
  for (size_t row = 0; row < rows.size(); ++row) limits.push_back(int64_t(noise() % 6));
  bool failed = check_look_up(h, rows, noise) || check_inputs(h, rows, limits, noise) ||
                check_accept(h, rows, limits, noise);
  Wide ids(rows.size(), 77);
  PutDraftsArgs put{ids.data(), rows.data(), h.tokens.data(), h.lens.data(), h.found.data(),
                     int64_t(rows.size()), width, width, 3};
  failed |= rl_put_drafts(&put) != 0;
  for (int64_t place : rows) {
    int64_t at = h.lens[size_t(place)] + 3;
    bool is_put = place && at < width;
    if (is_put && h.row(place)[at] != 77) failed |= wrong("put draft_token", place);
    if (h.found[size_t(place)] != (is_put ? 4 : 0)) failed |= wrong("found", place);
  }
  return failed;
}
