#include "write.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <random>
#include <string_view>

#include "checksum.h"
#include "error.h"
#include "handle.h"

namespace relax_grad {

namespace {

namespace fs = std::filesystem;

constexpr int kMostLinks = 40;
// As in relax_grad/training/_atomic.py: .NAME.XXXXXXXX.part, with a part of a name that is too long
// for that and its checksum.
constexpr size_t kRandom = 8, kChecksumDigits = 8;
constexpr std::string_view kSuffix = ".part";
constexpr size_t kMostOfName = 255;

/// Returns the name of a file in the names of files that take its place.
std::string StemOf(const fs::path& folder, const std::string& name) {
  long most = pathconf(folder.c_str(), _PC_NAME_MAX);
  size_t fits = most > 0 ? static_cast<size_t>(most) : kMostOfName;
  size_t others = 2 + kRandom + kSuffix.size();
  if (name.size() + others <= fits || fits < others + 1 + kChecksumDigits) return name;
  size_t length = fits - others - 1 - kChecksumDigits;
  // Characters of several bytes are whole.
  while (length && (name[length] & 0xC0) == 0x80) --length;
  return name.substr(0, length) + "~" + HexOf(Crc32(name.data(), name.size()));
}

/// Returns the path that symbolic links lead to, whose last one may name no file.
fs::path Resolved(const std::string& path) {
  fs::path resolved = path;
  std::error_code ignored;
  for (int i = 0; i < kMostLinks; ++i) {
    if (!fs::is_symlink(resolved, ignored)) return resolved;
    fs::path target = fs::read_symlink(resolved, ignored);
    if (ignored) return resolved;
    resolved = target.is_absolute() ? target : resolved.parent_path() / target;
  }
  throw Error(path + " cannot be written: there are too many symbolic links");
}

bool IsSame(int handle, const fs::path& path) {
  struct stat opened, named;
  return fstat(handle, &opened) == 0 && lstat(path.c_str(), &named) == 0 &&
         opened.st_dev == named.st_dev && opened.st_ino == named.st_ino;
}

bool IsLeftOver(const std::string& file, const std::string& name) {
  std::string start = "." + name + ".";
  if (file.size() != start.size() + kRandom + kSuffix.size()) return false;
  std::string_view random = std::string_view(file).substr(start.size(), kRandom);
  auto fits = [](char character) {
    return (character >= 'a' && character <= 'z') || (character >= '0' && character <= '9') ||
           character == '_';
  };
  return file.compare(0, start.size(), start) == 0 &&
         std::all_of(random.begin(), random.end(), fits) &&
         std::string_view(file).substr(start.size() + kRandom) == kSuffix;
}

/// Removes files whose writers were killed: those that nobody has locked.
void RemoveLeftOver(const fs::path& folder, const std::string& name) {
  std::error_code reason;
  std::vector<fs::path> left_over;
  for (fs::directory_iterator at(folder, reason), end; !reason && at != end; at.increment(reason)) {
    if (IsLeftOver(at->path().filename().string(), name)) left_over.push_back(at->path());
  }
  for (const fs::path& part : left_over) {
    Handle handle(open(part.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
    if (handle.number() >= 0 && flock(handle.number(), LOCK_EX | LOCK_NB) == 0)
      unlink(part.c_str());
  }
}

/// Makes names in a folder durable, where the system can.
void SyncFolder(const fs::path& folder) {
  Handle handle(open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (handle.number() >= 0) fsync(handle.number());
}

}  // namespace

void WriteFile(const std::string& path, const std::vector<std::pair<const void*, size_t>>& parts) {
  fs::path target = Resolved(path), folder = target.parent_path();
  if (folder.empty()) folder = ".";
  struct stat status;
  if (stat(target.c_str(), &status) == 0 && !S_ISREG(status.st_mode)) {
    throw Error(path + " cannot be written: it is " +
                (S_ISDIR(status.st_mode) ? "a folder" : "no regular file"));
  }
  std::string name = StemOf(folder, target.filename().string());
  RemoveLeftOver(folder, name);
  std::random_device random;
  fs::path part;
  auto fail = [&](const char* step) {
    std::string reason = std::strerror(errno);
    unlink(part.c_str());
    throw Error(path + " cannot be " + step + ": " + reason);
  };
  while (true) {
    part =
        folder / ("." + name + "." + HexOf(static_cast<uint32_t>(random())) + std::string(kSuffix));
    // The system subtracts the umask.
    Handle handle(open(part.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
    if (handle.number() < 0 && errno == EEXIST) continue;
    if (handle.number() < 0) throw Error(path + " cannot be written: " + std::strerror(errno));
    // Without locks, as on some file systems of networks, nobody removes it.
    flock(handle.number(), LOCK_EX);
    // Another writer may have removed it before it was locked.
    if (!IsSame(handle.number(), part)) continue;
    for (const auto& [data, size] : parts) {
      const char* at = static_cast<const char*>(data);
      size_t left = size;
      while (left) {
        ssize_t written = write(handle.number(), at, left);
        if (written < 0 && errno == EINTR) continue;
        if (written <= 0) fail("written");
        at += written;
        left -= static_cast<size_t>(written);
      }
    }
    if (fsync(handle.number()) != 0) fail("written");
    // The lock is held until nobody could take the file for one that was left over.
    if (rename(part.c_str(), target.c_str()) != 0) fail("replaced");
    break;
  }
  SyncFolder(folder);
}

}  // namespace relax_grad
