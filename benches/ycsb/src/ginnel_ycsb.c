// The native methods of Ginnel.java.

#include <ginnel.h>
#include <jni.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_KEY = 250, USUAL_VALUE = 4096 };

typedef struct {
    char bytes[MOST_KEY];
    size_t length;
} key_bytes;

static void fail(JNIEnv *env) {
    jclass class = (*env)->FindClass(env, "java/lang/IllegalStateException");
    if (class != NULL) {
        (*env)->ThrowNew(env, class, ginnel_last_error());
    }
}

static ginnel_cache *cache_of(jlong handle) {
    return (ginnel_cache *)(intptr_t)handle;
}

// A key that is too long is cut to a length that the library still refuses.
static key_bytes key_of(JNIEnv *env, jbyteArray array) {
    key_bytes key;
    jsize length = (*env)->GetArrayLength(env, array);
    key.length = (size_t)(length < MOST_KEY ? length : MOST_KEY);
    (*env)->GetByteArrayRegion(env, array, 0, (jsize)key.length, (jbyte *)key.bytes);
    return key;
}

JNIEXPORT jlong JNICALL Java_ginnel_Ginnel_open(JNIEnv *env, jclass class, jbyteArray address) {
    (void)class;
    key_bytes text = key_of(env, address);
    char name[MOST_KEY + 1];
    memcpy(name, text.bytes, text.length);
    name[text.length] = '\0';
    ginnel_cache *cache = NULL;
    if (ginnel_cache_open(name, NULL, &cache) != 0) {
        fail(env);
    }
    return (jlong)(intptr_t)cache;
}

JNIEXPORT void JNICALL Java_ginnel_Ginnel_close(JNIEnv *env, jclass class, jlong handle) {
    (void)env, (void)class;
    ginnel_cache_close(cache_of(handle));
}

static jbyteArray array_of(JNIEnv *env, const char *bytes, size_t length) {
    jbyteArray array = (*env)->NewByteArray(env, (jsize)length);
    if (array != NULL) {
        (*env)->SetByteArrayRegion(env, array, 0, (jsize)length, (const jbyte *)bytes);
    }
    return array;
}

JNIEXPORT jbyteArray JNICALL Java_ginnel_Ginnel_get(JNIEnv *env, jclass class, jlong handle, jbyteArray name) {
    (void)class;
    key_bytes key = key_of(env, name);
    char usual[USUAL_VALUE], *value = usual, *large = NULL;
    size_t room = sizeof usual;
    for (;;) {
        ginnel_cache_item item = {.size = sizeof item};
        ssize_t length = ginnel_cache_get(cache_of(handle), key.bytes, key.length, value, room, &item);
        if (length >= 0) {
            jbyteArray array = array_of(env, value, (size_t)length);
            free(large);
            return array;
        }
        if (length != GINNEL_ERR_BUFFER_TOO_SMALL) {
            if (length != GINNEL_ERR_NO_ITEM) {
                fail(env);
            }
            free(large);
            return NULL;
        }
        free(large);
        room = item.length;
        value = large = malloc(room);
        if (large == NULL) {
            abort();
        }
    }
}

JNIEXPORT void JNICALL Java_ginnel_Ginnel_set(JNIEnv *env, jclass class, jlong handle, jbyteArray name, jbyteArray bytes) {
    (void)class;
    key_bytes key = key_of(env, name);
    size_t length = (size_t)(*env)->GetArrayLength(env, bytes);
    char usual[USUAL_VALUE], *value = length <= sizeof usual ? usual : malloc(length);
    if (value == NULL) {
        abort();
    }
    (*env)->GetByteArrayRegion(env, bytes, 0, (jsize)length, (jbyte *)value);
    int status = ginnel_cache_set(cache_of(handle), key.bytes, key.length, value, length, 0, 0, NULL);
    if (value != usual) {
        free(value);
    }
    if (status != 0) {
        fail(env);
    }
}

JNIEXPORT jboolean JNICALL Java_ginnel_Ginnel_delete(JNIEnv *env, jclass class, jlong handle, jbyteArray name) {
    (void)class;
    key_bytes key = key_of(env, name);
    int status = ginnel_cache_delete(cache_of(handle), key.bytes, key.length);
    if (status != 0 && status != GINNEL_ERR_NO_ITEM) {
        fail(env);
    }
    return status == 0;
}
