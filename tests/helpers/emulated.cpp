// Runs calls of an extension on copies of their memory, at a fixed address: see emulated.py. Read for
// each call: int64 words (size, function, 8 arguments) and the bytes. Written: the bytes after it.
#include <cstdint>
#include <cstdio>
#include <sys/mman.h>

#include EXTENSION

typedef int64_t word;
typedef void (*Function)(word, word, word, word, word, word, word, word);

int main() {
    const Function functions[] = {FUNCTIONS};
    word head[10];
    while (fread(head, sizeof head, 1, stdin)) {
        void* base = (void*)BASE;
        if (mmap(base, head[0], PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) != base) return 1;
        if (fread(base, 1, head[0], stdin) != (size_t)head[0]) return 2;
        functions[head[1]](head[2], head[3], head[4], head[5], head[6], head[7], head[8], head[9]);
        fwrite(base, 1, head[0], stdout);
        fflush(stdout);
        munmap(base, head[0]);
    }
}
