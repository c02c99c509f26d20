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
// As in relax_grad/training/_atomic.py: .NAME.XXXXXXXX.part
constexpr size_t kRandom = 8;
constexpr std::string_view kSuffix = ".part";

/// Returns the path behind symbolic links, whose last one may name no file.
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
  std::string name = target.filename().string();
  if (folder.empty()) folder = ".";
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
