#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"
#include "cli/report_chart.h"
#include "cli/report_page.h"

namespace slipstream::cli {
namespace {

using nlohmann::json;

constexpr size_t kTokensMax = 1500;             // sampled ones shown of one sample
constexpr size_t kTextMax = 16 * kTokensMax;    // bytes shown of a span that was not sampled
constexpr size_t kSpanMax = 1000 * kTokensMax;  // tokens; a file may say anything
constexpr size_t kBranchesMax = 8;              // further samples shown of one trajectory
constexpr size_t kIdsInTip = 24;
constexpr double kDarkest = 4.0;  // nats: a token this surprising has the full colour
constexpr int kShades = 8;

const json& member(const json& object, const char* key) {
  static const json none;
  const auto found = object.find(key);
  return found != object.end() ? *found : none;
}

// Element i of an array, null for anything else.
const json& at(const json& array, size_t i) {
  static const json none;
  return array.is_array() && i < array.size() ? array[i] : none;
}

std::string word(const json& value) {
  return value.is_string() ? value.get<std::string>()
         : value.is_null() ? "-"
                           : value.dump(-1, ' ', false, json::error_handler_t::replace);
}

std::string number(const json& value) {
  return value.is_number() ? absl::StrFormat("%.4f", value.get<double>()) : "none";
}

// Line ends are shown, and end the line.
std::string visible(const std::string& text) {
  return absl::StrReplaceAll(escape(text), {{"\n", "<u>\xe2\x86\xb5</u>\n"}});
}

struct Token {
  std::string classes, tip, text;
};

// Token `a` of the action columns of sample `s`, at `position` of its ids.
Token action_token(const json& s, size_t a, size_t position) {
  const json& rollout = at(member(s, "action_logprobs"), a);
  const json& trained = at(member(s, "trained"), a);
  const json& text = at(member(s, "action_texts"), a);
  const std::string id = escape(word(at(member(s, "ids"), position)));
  const bool no_loss = trained == 0 || trained == false;
  int shade = 0;
  if (rollout.is_number()) {
    const double surprise = std::clamp(-rollout.get<double>() / kDarkest, 0.0, 1.0);
    shade = static_cast<int>(std::lround(surprise * kShades));
  }
  return {.classes = absl::StrCat("tok a s", shade, no_loss ? " off" : ""),
          .tip = absl::StrCat("id ", id, "&#10;rollout log-prob ", number(rollout), "&#10;learner log-prob ",
                              number(at(member(s, "learner_logprobs"), a)), "&#10;importance ratio ",
                              number(at(member(s, "importance_ratios"), a)), "&#10;policy version ",
                              escape(word(at(member(s, "action_policy_versions"), a))),
                              no_loss ? "&#10;no loss: masked" : ""),
          .text = text.is_string() ? visible(text.get<std::string>()) : absl::StrCat("#", id, " ")};
}

// A span that was not sampled, in one piece.
Token given_span(const json& s, const json& span, size_t position, size_t length) {
  std::string ids;
  for (size_t i = 0; i < std::min(length, kIdsInTip); ++i) {
    absl::StrAppend(&ids, " ", escape(word(at(member(s, "ids"), position + i))));
  }
  if (length > kIdsInTip) ids += " ...";
  std::string text = absl::StrCat(length, " tokens:", ids);
  if (member(span, "text").is_string()) {
    std::string raw = member(span, "text").get<std::string>();
    if (raw.size() > kTextMax) raw = raw.substr(0, kTextMax) + " ...";
    text = visible(raw);
  }
  return {.classes = "tok off", .tip = absl::StrCat(length, " tokens, no loss&#10;ids", ids), .text = text};
}

std::string html_of(const Token& token) {
  return absl::StrCat("<span class=\"", token.classes, "\" data-t=\"", token.tip, "\">", token.text, "</span>");
}

// The spans of one sample, each a row; sampled tokens one by one.
std::string strip(const json& s) {
  const json& spans = member(s, "spans");
  if (!spans.is_array()) return "<p class=\"none\">No tokens recorded.</p>";
  std::string out;
  size_t position = 0, action = 0;
  for (const json& span : spans) {
    if (!span.is_object() || !member(span, "length").is_number_unsigned()) continue;
    const auto length = std::min(member(span, "length").get<size_t>(), kSpanMax);
    const std::string kind = word(member(span, "kind"));
    const bool is_action = kind == "action";
    absl::StrAppend(&out, "<div class=\"span\"><b>",
                    is_action               ? "model"
                    : kind == "observation" ? "environment"
                                            : escape(kind),
                    "</b><div>");
    if (is_action) {
      const size_t fit = std::min(length, kTokensMax - std::min(action, kTokensMax));
      for (size_t i = 0; i < fit; ++i) out += html_of(action_token(s, action + i, position + i));
      if (fit < length) absl::StrAppend(&out, "<i> ... ", length - fit, " more tokens</i>");
      action += length;
    } else {
      out += html_of(given_span(s, span, position, length));
    }
    out += "</div></div>";
    position += length;
  }
  return out;
}

}  // namespace

std::string render_trajectory(const json& t) {
  const json& reward = member(t, "reward");
  const json& advantage = member(t, "advantage");
  const std::string facts[] = {
      absl::StrCat("<b class=\"reward\">reward ",
                   reward.is_number() ? short_number(reward.get<double>()) : "-", "</b>"),
      absl::StrCat("advantage ",
                   advantage.is_number() ? absl::StrFormat("%+.3g", advantage.get<double>()) : "-"),
      absl::StrCat("task ", escape(word(member(t, "task"))), " #", escape(word(member(t, "instance")))),
      absl::StrCat("ended by ", escape(word(member(t, "finish_reason")))),
      absl::StrCat("staleness ", escape(word(member(t, "staleness")))),
      absl::StrCat("<span class=\"id\">", escape(word(member(t, "rollout_id"))), "</span>")};
  std::string out = "<article><header>";
  for (const std::string& fact : facts) absl::StrAppend(&out, "<span>", fact, "</span>");
  absl::StrAppend(&out, "</header>", strip(t));
  const json& more = member(t, "more_samples");
  for (size_t i = 0; more.is_array() && i < std::min(more.size(), kBranchesMax); ++i) {
    if (!more[i].is_object()) continue;
    absl::StrAppend(&out, "<div class=\"branch\">branch ", i + 2, " of ", more.size() + 1, "</div>", strip(more[i]));
  }
  return out + "</article>\n";
}

}  // namespace slipstream::cli
