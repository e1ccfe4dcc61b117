#include <algorithm>
#include <cmath>
#include <optional>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"
#include "cli/report_chart.h"
#include "cli/report_page.h"

namespace slipstream::cli {
namespace {

using nlohmann::json;

constexpr size_t kTokensMax = 1500;  // of one trajectory shown
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

struct Action {
  std::string classes, tip;
};

Action action_token(const json& t, size_t a, const json& id) {
  const json& rollout = at(member(t, "action_logprobs"), a);
  const json& trained = at(member(t, "trained"), a);
  const bool no_loss = trained == 0 || trained == false;
  Action out;
  int shade = 0;
  if (rollout.is_number()) {
    const double surprise = std::clamp(-rollout.get<double>() / kDarkest, 0.0, 1.0);
    shade = static_cast<int>(std::lround(surprise * kShades));
  }
  out.classes = absl::StrCat("tok a s", shade, no_loss ? " off" : "");
  out.tip = absl::StrCat("id ", word(id), "&#10;rollout log-prob ", number(rollout), "&#10;learner log-prob ",
                         number(at(member(t, "learner_logprobs"), a)), "&#10;policy version ",
                         escape(word(at(member(t, "action_policy_versions"), a))),
                         no_loss ? "&#10;no loss: masked" : "");
  return out;
}

std::string strip(const json& t) {
  const json& ids = member(t, "ids");
  const json& texts = member(t, "tokens_text");
  const json& action_texts = member(t, "action_texts");
  std::string out;
  size_t position = 0, action = 0, shown = 0;
  const json& spans = member(t, "spans");
  if (!spans.is_array()) return "<p class=\"none\">No tokens recorded.</p>";
  for (const json& span : spans) {
    if (!span.is_object() || !member(span, "length").is_number_unsigned()) continue;
    const auto length = std::min<size_t>(member(span, "length").get<size_t>(), kTokensMax * 1000);
    const std::string kind = word(member(span, "kind"));
    const bool is_action = kind == "action";
    absl::StrAppend(&out, "<div class=\"span\"><b>",
                    is_action               ? "model"
                    : kind == "observation" ? "environment"
                                            : escape(kind),
                    "</b><div>");
    const size_t fit = std::min(length, kTokensMax - std::min(shown, kTokensMax));
    if (!is_action && !at(texts, position).is_string() && member(span, "text").is_string()) {
      std::string tip = absl::StrCat(length, " tokens, no loss&#10;ids");
      for (size_t i = 0; i < std::min(length, kIdsInTip); ++i)
        absl::StrAppend(&tip, " ", escape(word(at(ids, position + i))));
      if (length > kIdsInTip) tip += " ...";
      std::string text = member(span, "text").get<std::string>();
      if (text.size() > 16 * kTokensMax) text = text.substr(0, 16 * kTokensMax) + " ...";
      absl::StrAppend(&out, "<span class=\"tok off\" data-t=\"", tip, "\">", visible(text), "</span>");
    } else {
      for (size_t i = 0; i < fit; ++i) {
        const json& id = at(ids, position + i);
        const json& text = is_action && !at(texts, position + i).is_string() ? at(action_texts, action + i)
                                                                             : at(texts, position + i);
        const Action token = is_action
                                 ? action_token(t, action + i, id)
                                 : Action{"tok off", absl::StrCat("id ", escape(word(id)), "&#10;no loss")};
        absl::StrAppend(
            &out, "<span class=\"", token.classes, "\" data-t=\"", token.tip, "\">",
            text.is_string() ? visible(text.get<std::string>()) : absl::StrCat("#", escape(word(id)), " "),
            "</span>");
      }
      shown += fit;
      if (fit < length) absl::StrAppend(&out, "<i> ... ", length - fit, " more tokens</i>");
    }
    out += "</div></div>";
    position += length;
    if (is_action) action += length;
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
  return absl::StrCat(out, "</header>", strip(t), "</article>\n");
}

}  // namespace slipstream::cli
