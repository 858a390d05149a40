# Checks that the shared library exports the functions that the header declares, and nothing else.
# cmake -DNM=nm -DLIBRARY=libflashmsa.so -DHEADER=flashmsa.h -P exports.cmake

execute_process(COMMAND ${NM} -D --defined-only ${LIBRARY} OUTPUT_VARIABLE symbols RESULT_VARIABLE code)
if(NOT code EQUAL 0)
    message(FATAL_ERROR "${NM} could not read ${LIBRARY}")
endif()
string(REGEX MATCHALL " [A-Zi] [^\n]+" exported "${symbols}")
list(TRANSFORM exported REPLACE "^ [A-Zi] ([^@\n]+).*$" "\\1")
list(SORT exported)

file(READ ${HEADER} header)
string(REGEX MATCHALL "FMSA_API [^;(]*fmsa_[a-z_0-9]+\\(" declared "${header}")
list(TRANSFORM declared REPLACE "^.*(fmsa_[a-z_0-9]+)\\($" "\\1")
list(SORT declared)

if(NOT exported STREQUAL declared)
    message(FATAL_ERROR "exported: ${exported}\ndeclared: ${declared}")
endif()
list(LENGTH exported count)
message(STATUS "${count} functions exported, as declared")
