/// What a rank of a group says to the others about its calls, and a member of a link about versions.

#include <stdexcept>
#include <string>

#include "fuzz/fuzz.h"
#include "runtime/agreement/messages.h"
#include "runtime/link/messages.h"

using xmesh::fuzz::promise;
using namespace xmesh::runtime;

namespace {

template <typename Message>
void expectComesBack(std::string_view bytes, Message (*decode)(std::string_view)) {
  const std::string once = encode(decode(bytes));
  promise(encode(decode(once)) == once, "a message comes back");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view bytes = xmesh::fuzz::textOf(data, size);
  try {
    if (link::isLinkMessage(bytes)) {
      const std::string once = link::encode(link::decode(bytes));
      promise(link::encode(link::decode(once)) == once, "a link's message comes back");
      return 0;
    }
    switch (controlKind(bytes)) {
      case ControlKind::kCallNotice: {
        expectComesBack(bytes, decodeCallNotice);
        const CallNotice notice = decodeCallNotice(bytes);
        promise(!firstDifference(notice.fields, 0, notice.fingerprint, 1).empty(), "a difference has a text");
        break;
      }
      case ControlKind::kFail:
        expectComesBack(bytes, decodeFail);
        break;
      case ControlKind::kQuestion:
        expectComesBack(bytes, decodeQuestion);
        break;
      case ControlKind::kAnswer:
        expectComesBack(bytes, decodeAnswer);
        break;
      case ControlKind::kTurnRequest:
        expectComesBack(bytes, decodeTurnRequest);
        break;
      case ControlKind::kReturn:
        expectComesBack(bytes, decodeReturn);
        break;
      case ControlKind::kUnnamedRefusals:
        expectComesBack(bytes, decodeUnnamedRefusals);
        break;
      case ControlKind::kArrival:
        expectComesBack(bytes, decodeArrival);
        break;
      case ControlKind::kIntroduction:
        expectComesBack(bytes, decodeIntroduction);
        break;
    }
  } catch (const std::runtime_error&) {  // as promised for what is no message
  }
  return 0;
}
