/* A stand-in for an Nsight tool: writes every NVTX event to the file named by NVTX_LOG, one line each,
 *     kind TAB domain TAB message TAB category TAB payload
 * NVTX loads it when NVTX_INJECTION64_PATH names it. The structures are those of nvtx3/nvtxDetail/nvtxTypes.h,
 * nvtxExtTypes.h and nvToolsExt.h, cut down to what is read here. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct { char *text; } Named; /* what a domain's and a registered string's handle point to */

typedef struct {
    uint16_t version, size;
    uint32_t category;
    int32_t color_type;
    uint32_t color;
    int32_t payload_type, reserved;
    int64_t payload;
    int32_t message_type;
    const void *message;
} Attributes;

enum { MESSAGE_ASCII = 1, MESSAGE_REGISTERED = 3, PAYLOAD_INT64 = 2 };
enum { MARK = 1, PUSH = 4, POP = 5, NAME_CATEGORY = 8, REGISTER_STRING = 10, CREATE = 12 }; /* NvtxCallbackIdCore2 */
enum { EXPORT_CALLBACKS = 1, MODULE_CORE2 = 5, DOMAIN_IS_ENABLED = 7 };

static FILE *out;
static char *categories[64];

static void write_line(const char *kind, const Named *domain, const Attributes *a) {
    const char *message = "", *category = "";
    char payload[32] = "";
    if (a && a->message_type == MESSAGE_REGISTERED) message = ((const Named *)a->message)->text;
    if (a && a->message_type == MESSAGE_ASCII) message = (const char *)a->message;
    if (a && a->category < 64 && categories[a->category]) category = categories[a->category];
    if (a && a->payload_type == PAYLOAD_INT64) snprintf(payload, sizeof payload, "%lld", (long long)a->payload);
    fprintf(out, "%s\t%s\t%s\t%s\t%s\n", kind, domain ? domain->text : "", message, category, payload);
    fflush(out);
}

static Named *named(const char *text) {
    Named *n = malloc(sizeof *n);
    n->text = strdup(text ? text : "");
    return n;
}

static Named *create(const char *name) { return named(name); }
static Named *register_string(Named *domain, const char *text) { return named(text); }
static void name_category(Named *domain, uint32_t id, const char *name) { if (id < 64) categories[id] = strdup(name); }
static void mark(Named *domain, const Attributes *a) { write_line("mark", domain, a); }
static int push(Named *domain, const Attributes *a) { write_line("push", domain, a); return 0; }
static int pop(Named *domain) { write_line("pop", domain, NULL); return 0; }
static uint8_t is_enabled(Named *domain) { return 1; }

typedef void (*Function)(void);
typedef struct {
    size_t size;
    int (*module_functions)(int module, Function ***table, unsigned *size);
} Callbacks;

int InitializeInjectionNvtx2(const void *(*export_table)(uint32_t)) {
    const Callbacks *callbacks = export_table(EXPORT_CALLBACKS);
    Function **table;
    unsigned size;
    const char *path = getenv("NVTX_LOG");
    if (!out) out = path ? fopen(path, "a") : NULL;
    if (!out || !callbacks || !callbacks->module_functions(MODULE_CORE2, &table, &size) || size <= CREATE) return 0;
    *table[MARK] = (Function)mark;
    *table[PUSH] = (Function)push;
    *table[POP] = (Function)pop;
    *table[NAME_CATEGORY] = (Function)name_category;
    *table[REGISTER_STRING] = (Function)register_string;
    *table[CREATE] = (Function)create;
    return 1;
}

typedef struct { size_t id, slots; intptr_t *functions; } Segment;
typedef struct {
    uint16_t version, size, module, compatibility;
    size_t segment_count;
    Segment *segments;
} Extension;

/* The payload extension: nvtx asks it whether the domain is enabled. Its module id is 2 (NVTX_EXT_PAYLOAD_MODULEID). */
int InitializeInjectionNvtxExtension(Extension *extension) {
    if (extension->module != 2 || !extension->segment_count || extension->segments->slots <= DOMAIN_IS_ENABLED) return 0;
    extension->segments->functions[DOMAIN_IS_ENABLED] = (intptr_t)is_enabled;
    return 1;
}
