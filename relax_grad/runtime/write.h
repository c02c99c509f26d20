/// Files that appear whole or not at all, whenever the process is killed.
#ifndef RELAX_GRAD_RUNTIME_WRITE_H_
#define RELAX_GRAD_RUNTIME_WRITE_H_

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

namespace relax_grad {

/// Writes a file under another name beside it, and renames it when the disk has all of it. What
/// killed processes left of such files is removed. A symbolic link stays, and the file that it
/// names is replaced. The permissions are those of the umask.
void WriteFile(const std::string& path, const std::vector<std::pair<const void*, size_t>>& parts);

}  // namespace relax_grad

#endif  // RELAX_GRAD_RUNTIME_WRITE_H_
